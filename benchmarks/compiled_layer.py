"""Measures rate and memory of a compiled decoder layer at several activation budgets, and of the chunked loss.

    python -m benchmarks.compiled_layer OUT.json [--shape 14B] [--sequences 8,64] [--seq-len 1024] [--budgets 0,0.1,1]
                                        [--chunks 512,4096]

Shapes are those of Qwen2.5, weights and inputs are random numbers, on a GPU. Model TFLOPS are as in docs/bench.md. What
plans count for a backward (backward_memory.py) is `kept_bytes` + `backward_bytes`, less the layer's output, which is
part of `kept_bytes` here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from megatrain_ray.engine.layer_calls.compiled_call import compiler_options
from megatrain_ray.machine.environment import hardware, versions

SECONDS = 0.6  # of measuring, for each row
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class Shape(NamedTuple):
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int

    def flops(self, batch: int, seq_len: int) -> float:
        """Return the FLOPs of a layer's forward and backward; causal attention counts half of the T x T products."""
        matrices = 2 * self.hidden**2 + 2 * self.hidden * self.kv_heads * (self.hidden // self.heads)
        weights = matrices + 3 * self.hidden * self.inner
        return 6.0 * weights * batch * seq_len + 6.0 * self.hidden * batch * seq_len**2


SHAPES = {
    "3B": Shape(2048, 11008, 16, 2, 151936),
    "7B": Shape(3584, 18944, 28, 4, 152064),
    "14B": Shape(5120, 13824, 40, 8, 152064),
    "32B": Shape(5120, 27648, 40, 8, 152064),
}


class Peak(NamedTuple):
    """Holds the bytes that work allocated: `after` it, and at `most` within it, both beyond those before it."""

    after: int
    most: int


def memory_of(work: Callable[[], object]) -> tuple[object, Peak]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    torch.cuda.synchronize()
    return result, Peak(torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before)


def times(works: Sequence[Callable[[], None]]) -> list[float]:
    """Return the mean milliseconds of each work. The works run in turn, for at least SECONDS and three rounds."""
    totals, rounds = [0.0] * len(works), 0
    while sum(totals) < 1000 * SECONDS or rounds < 3:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
        events[0].record()
        for work, event in zip(works, events[1:], strict=True):
            work()
            event.record()
        torch.cuda.synchronize()
        for i in range(len(works)):
            totals[i] += events[i].elapsed_time(events[i + 1])
        rounds += 1
    return [total / rounds for total in totals]


def measured(
    run: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, sources: Sequence[torch.Tensor],
    gradient: torch.Tensor, budget: float, flops: float,
) -> tuple[dict[str, float], Callable[[], None], Callable[[], None]]:  # fmt: skip
    """Return the numbers of a compiled function with `flops` of forward and backward, and both of these as works."""
    compiled = torch.compile(run, fullgraph=True, dynamic=False, options=compiler_options())
    made: list[torch.Tensor] = []

    def forward() -> None:
        made.append(compiled(hidden))

    def backward() -> None:
        torch.autograd.grad(made.pop(), sources, gradient)

    with functorch_config.patch(activation_memory_budget=budget):
        forward()
        backward()
    _, kept = memory_of(forward)
    _, work = memory_of(backward)
    forward_ms, backward_ms = times([forward, backward])
    row = {
        "budget": budget, "forward_ms": forward_ms, "backward_ms": backward_ms,
        "model_tflops": flops / (forward_ms + backward_ms) / 1e9,
        "kept_bytes": kept.after, "backward_bytes": work.most,
    }  # fmt: skip
    return row, forward, backward


def layer_row(shape: Shape, batch: int, seq_len: int, budget: float) -> dict[str, float]:
    torch._dynamo.reset()
    config = Qwen2Config(
        hidden_size=shape.hidden, intermediate_size=shape.inner, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, num_hidden_layers=1, attn_implementation="sdpa",
    )  # fmt: skip
    layer = Qwen2DecoderLayer(config, 0).to("cuda", torch.bfloat16)
    hidden = torch.randn(batch, seq_len, shape.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rotation = Qwen2RotaryEmbedding(config).to("cuda")(hidden, torch.arange(seq_len, device="cuda")[None])
    gradient, sources = torch.randn_like(hidden), [hidden, *layer.parameters()]

    def run(x: torch.Tensor) -> torch.Tensor:
        out = layer(x, position_embeddings=rotation, attention_mask=None)
        return out[0] if isinstance(out, tuple) else out

    row, *_ = measured(run, hidden, sources, gradient, budget, shape.flops(batch, seq_len))
    return {"sequences": batch, "seq_len": seq_len, **row}


def loss_row(shape: Shape, num_tokens: int, chunk: int) -> dict[str, float]:
    torch._dynamo.reset()
    weight = torch.randn(shape.vocab, shape.hidden, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    hidden = torch.randn(num_tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(shape.vocab, (num_tokens,), device="cuda")

    def loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, w).float(), y, reduction="sum")

    compiled = torch.compile(loss, fullgraph=True, dynamic=False, options=compiler_options())

    def run() -> None:
        total = torch.zeros(weight.shape, device="cuda")
        for start in range(0, num_tokens, chunk):
            part = hidden[start : start + chunk].detach().requires_grad_()
            of_chunk = compiled(part, weight, targets[start : start + chunk]) / num_tokens
            total += torch.autograd.grad(of_chunk, [part, weight])[1]

    run()
    _, peak = memory_of(run)
    (milliseconds,) = times([run])
    flops = 6.0 * shape.hidden * shape.vocab * num_tokens
    rate = flops / milliseconds / 1e9
    return {"tokens": num_tokens, "chunk": chunk, "ms": milliseconds, "model_tflops": rate, "bytes": peak.most}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shape, seq_len = SHAPES[options.shape], options.seq_len
    with sdpa_kernel(BACKENDS, set_priority=True):
        for batch in options.sequences:
            for budget in options.budgets:
                yield {"what": "layer", **layer_row(shape, batch, seq_len, budget)}
        for chunk in options.chunks:
            yield {"what": "loss", **loss_row(shape, 16 * 1024, chunk)}


def numbers(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    return lambda text: [kind(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="14B")
    parser.add_argument("--sequences", type=numbers(int), default=[8])
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--budgets", type=numbers(float), default=[0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0])
    parser.add_argument("--chunks", type=numbers(int), default=[])
    options = parser.parse_args()
    found = []
    for row in rows(options):
        found.append(row)
        print(json.dumps(row), flush=True)
        report = {"shape": options.shape, "rows": found, "hardware": hardware("cuda"), "versions": versions()}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
