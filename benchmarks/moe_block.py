"""Measures a compiled block of a mixture of experts: seconds, kept bytes, sums by kernel, balance of its routing.

    python -m benchmarks.moe_block OUT.json [--shape qwen3_30b] [--tokens 65536] [--budgets 1,0]
                                   [--part block] [--ways grouped_mm,routed]

Beside each block stand the rates of `torch._grouped_mm` alone, with the same rows and matrices (`products`), and how
far the experts' output and gradients are from those in FP32 by Transformers' eager code (`errors`: ‖a − b‖ ÷ ‖b‖).
Weights and inputs are random numbers, on a GPU. `part` is the block, or its experts with their router where the model's
attention is not SDPA. Model TFLOPS are as in docs/bench.md: recomputation is not counted.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.compiled_layer import BACKENDS, measured, times
from megatrain_ray.engine.layer_calls.compiled_call import compiler_options
from megatrain_ray.engine.model.routed_experts import use_routed_experts
from megatrain_ray.machine.environment import hardware, versions

SEQ_LEN = 1024
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_30b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "norm_topk_prob": True,
    },
    "olmoe": {
        "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64,
        "num_experts_per_tok": 8, "num_attention_heads": 16, "num_key_value_heads": 16,
    },
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "gpt_oss_20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    },
}  # fmt: skip


def build(shape: str) -> tuple[nn.Module, nn.Module]:
    """Return a block with random weights, and the rotary embedding of its model."""
    settings = SHAPES[shape] | {"num_hidden_layers": 1, "vocab_size": 256}
    config = AutoConfig.for_model(settings["model_type"], **{k: v for k, v in settings.items() if k != "model_type"})
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():  # some models leave their experts uninitialized
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model.model.layers[0], model.model.rotary_emb


def flops(block: nn.Module, tokens: int, *, attends: bool) -> float:
    """Return the model FLOPs of the forward; a backward has twice as many."""
    experts = block.mlp.experts
    of_experts = sum(p.numel() for p in experts.parameters() if p.dim() == 3) / experts.num_experts
    others = sum(p.numel() for p in block.parameters() if p.dim() == 2) - sum(
        p.numel() for p in experts.parameters() if p.dim() == 2
    )
    if not attends:
        others = sum(p.numel() for p in router(block).parameters() if p.dim() == 2)
    top_k = next(m.top_k for m in block.mlp.modules() if hasattr(m, "top_k"))
    total = 2.0 * tokens * (of_experts * top_k + others)
    if attends:
        width = block.self_attn.config.num_attention_heads * block.self_attn.head_dim
        total += 2.0 * width * tokens * SEQ_LEN
    return total


def router(block: nn.Module) -> nn.Module:
    return next(m for m in block.mlp.modules() if hasattr(m, "top_k") and m is not block.mlp)


def balance(block: nn.Module, hidden: Tensor) -> dict[str, float]:
    """Return how even the routing is: the most and fewest rows of an expert, as multiples of their mean."""
    *_, chosen = router(block)(hidden.reshape(-1, hidden.shape[-1]))
    rows = torch.bincount(chosen.reshape(-1), minlength=block.mlp.experts.num_experts).double()
    mean = rows.mean().item()
    return {"rows_of_an_expert": mean, "most": rows.max().item() / mean, "fewest": rows.min().item() / mean}


def product_rows(block: nn.Module, tokens: int, top_k: int) -> Iterator[dict[str, Any]]:
    """Measure the grouped products of a forward and backward alone, every expert with equally many rows."""
    experts = block.mlp.experts
    number, num_rows = experts.num_experts, tokens * top_k
    ends = torch.arange(1, number + 1, device="cuda", dtype=torch.int32) * (num_rows // number)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name).detach()
        weight = weight if experts.is_transposed else weight.transpose(-2, -1)  # [E, in, out]
        _, given, made = weight.shape
        x, y = (torch.randn(num_rows, n, device="cuda", dtype=torch.bfloat16) for n in (given, made))
        works: dict[str, Callable[[], Any]] = {
            "forward": partial(torch._grouped_mm, x, weight, offs=ends),
            "of inputs": partial(torch._grouped_mm, y, weight.transpose(-2, -1), offs=ends),
            "of weights": partial(torch._grouped_mm, y.t(), x, offs=ends),
        }
        for what, work in works.items():
            work()
            (ms,) = times([lambda work=work: work()])  # type: ignore[misc]
            rate = 2.0 * num_rows * given * made / ms / 1e9
            yield {"matrix": name, "product": what, "ms": ms, "tflops": rate}


def block_row(
    options: argparse.Namespace, block: nn.Module, rotary: nn.Module, way: str, budget: float
) -> dict[str, Any]:
    torch._dynamo.reset()
    whole = options.part == "block"
    torch.manual_seed(1)
    shape = options.tokens // SEQ_LEN, SEQ_LEN, SHAPES[options.shape]["hidden_size"]
    hidden = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rotation = rotary(hidden, torch.arange(SEQ_LEN, device="cuda")[None])
    module = block if whole else block.mlp
    config = block.mlp.experts.config
    config._experts_implementation = "grouped_mm"
    if way == "routed":
        use_routed_experts(block)
    gradient, sources = torch.randn_like(hidden), [hidden, *module.parameters()]

    def run(x: Tensor) -> Tensor:
        out = module(x, position_embeddings=rotation, attention_mask=None) if whole else module(x)
        return out[0] if isinstance(out, tuple) else out

    model_flops = flops(block, options.tokens, attends=whole)
    numbers, forward, backward = measured(run, hidden, sources, gradient, budget, 3 * model_flops)
    row: dict[str, Any] = {"way": way, **numbers}
    if not options.no_kernels:
        row |= {"forward_kernels": kernels(forward), "backward_kernels": kernels(backward)}
    return row


def error_row(block: nn.Module, way: str, num_tokens: int = 4096) -> dict[str, Any]:
    torch._dynamo.reset()
    experts, config = block.mlp.experts, block.mlp.experts.config
    torch.manual_seed(2)
    hidden, gradient = torch.randn(2, num_tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16)
    top_k = router(block).top_k
    chosen = torch.rand(num_tokens, experts.num_experts, device="cuda").topk(top_k)[1]
    weights = torch.rand(num_tokens, top_k, device="cuda", dtype=torch.bfloat16)

    def results(module: nn.Module, call: Callable[..., Tensor]) -> list[Tensor]:
        dtype = next(module.parameters()).dtype
        x, w = (t.to(dtype).requires_grad_() for t in (hidden, weights))
        out = call(x, chosen, w)
        return [out, *torch.autograd.grad(out, [x, w, *module.parameters()], gradient.to(dtype))]

    config._experts_implementation = "eager"
    wide = deepcopy(experts).float()
    exact = results(wide, wide)
    config._experts_implementation = "grouped_mm"
    if way == "routed":
        use_routed_experts(block)
    call = torch.compile(lambda *args: experts(*args), fullgraph=True, dynamic=False, options=compiler_options())
    names = ["output", "tokens", "weights", *(name for name, _ in experts.named_parameters())]
    pairs = zip(names, results(experts, call), exact, strict=True)
    return {"way": way} | {name: ((a - b).norm() / b.norm()).item() for name, a, b in pairs}


def kernels(work: Callable[[], None], most: int = 24) -> list[list[Any]]:
    """Return name, calls and milliseconds of the kernels that took longest."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    ms: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            ms[event.name[:110]] += event.device_time / 1000
            calls[event.name[:110]] += 1
    return [[name, calls[name], round(total, 3)] for name, total in ms.most_common(most)]


def measure(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    block, rotary = build(options.shape)
    hidden = torch.randn(options.tokens, SHAPES[options.shape]["hidden_size"], device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        yield "balance", balance(block, hidden)
        for row in product_rows(block, options.tokens, router(block).top_k):
            yield "products", row
    for way in options.ways:
        yield "errors", error_row(block, way)
    with sdpa_kernel(BACKENDS, set_priority=True):
        for budget in options.budgets:
            for way in options.ways:
                yield "blocks", block_row(options, block, rotary, way, budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_30b")
    parser.add_argument("--part", choices=("block", "mlp"), default="block")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--budgets", type=lambda text: [float(part) for part in text.split(",")], default=[1.0, 0.0])
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["grouped_mm", "routed"])
    parser.add_argument("--no-kernels", action="store_true")
    options = parser.parse_args()
    report: dict[str, Any] = {"shape": options.shape, "part": options.part, "tokens": options.tokens}
    report |= {"hardware": hardware("cuda"), "versions": versions(), "balance": [], "products": [], "errors": []}
    report["blocks"] = []
    for kind, row in measure(options):
        report[kind].append(row)
        print(kind, json.dumps({key: value for key, value in row.items() if "kernels" not in key}), flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
