"""Measures the exact kernels of attention that torch can call: rates forward and backward, and how far off they are.

    python -m benchmarks.attention OUT.json [--device cuda] [--lengths 1024,4096,16384] [--heads 40] [--kv-heads 8]
        [--head-dim 128] [--tokens 16384] [--flex]

Kernels of torch's SDPA: cuDNN's, flash attention, and FA3 and FA4 where their packages are installed, which torch lets
take flash attention's place (`torch.nn.attention.list_flash_attention_impls`). One that fails has its error instead of
rates. Attention is causal, in bf16, over sequences of `--tokens` tokens in all; rates count it once. Errors are
‖a − b‖ ÷ ‖b‖ against FP32, of the output and of the three gradients, for the first length.

`--flex` also compiles flex attention, forward and backward, as a plan with several documents in a row or with windows
does before its first step, and reports the seconds of each mask's first and second compilation of a process.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatrain_ray.engine.layer_calls.compiled_call import compiler_options
from megatrain_ray.machine.environment import commit, hardware, versions

ROUNDS = 10
WINDOW = 128
Step = Callable[[], tuple[Tensor, ...]]


def kernels() -> Iterator[tuple[str, SDPBackend]]:
    """Yield the name and backend of each kernel, with flash attention's place taken by the named one meanwhile."""
    yield "cudnn", SDPBackend.CUDNN_ATTENTION
    yield "flash", SDPBackend.FLASH_ATTENTION
    for name in getattr(attention, "list_flash_attention_impls", list)():
        yield name, SDPBackend.FLASH_ATTENTION


def use(name: str) -> None:
    """Let this kernel take flash attention's place, if it is one that can. Raises any class if it is not installed."""
    if name in getattr(attention, "list_flash_attention_impls", list)():
        attention.activate_flash_attention_impl(name)


def inputs(options: argparse.Namespace, length: int) -> list[Tensor]:
    """Return queries, keys, values and a gradient of the output: [B, heads, T, D]."""
    torch.manual_seed(0)
    batch = max(1, options.tokens // length)
    heads = options.heads, options.kv_heads, options.kv_heads, options.heads
    shapes = [(batch, number, length, options.head_dim) for number in heads]
    made = [torch.randn(shape, device=options.device, dtype=torch.bfloat16) for shape in shapes]
    return [tensor.requires_grad_(i < 3) for i, tensor in enumerate(made)]


def forward(given: Sequence[Tensor]) -> Tensor:
    query, key, value = given[:3]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


def both(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    output = forward(given)
    return output, *torch.autograd.grad(output, given[:3], given[3].to(output.dtype))


def seconds(work: Callable[[], object], device: str) -> float:
    """Return the mean seconds of the work after one call that does not count."""
    for count in (1, ROUNDS):
        start_s = time.perf_counter()
        for _ in range(count):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / ROUNDS


def measure(name: str, backend: SDPBackend, options: argparse.Namespace) -> dict[str, Any]:
    """Return the rates of a kernel by length, and its errors; or why it does not work."""
    found: dict[str, Any] = {"kernel": name, "tflops": {}}
    try:
        use(name)
        with sdpa_kernel([backend]):
            for length in options.lengths:
                given = inputs(options, length)
                flops = 2.0 * options.head_dim * options.heads * given[0].shape[0] * length**2  # of one pass
                forward_s = seconds(partial(forward, given), options.device)
                backward_s = seconds(partial(both, given), options.device) - forward_s
                rates = {"forward": flops / forward_s / 1e12, "backward": 2 * flops / backward_s / 1e12}
                found["tflops"][str(length)] = rates
            ours = both(inputs(options, options.lengths[0]))
    except Exception as error:  # whatever class a package raises
        return found | {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
    finally:
        getattr(attention, "restore_flash_attention_impl", lambda **_: None)(_raise_warn=False)
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs(options, options.lengths[0])]
    with sdpa_kernel([SDPBackend.MATH]):
        exact = both(wide)
    pairs = [(a.detach(), b.detach()) for a, b in zip(ours, exact, strict=True)]
    return found | {"errors": [((a - b).norm() / b.norm()).item() for a, b in pairs]}


def compile_flex(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the seconds in which flex attention is compiled for causal rows, windows and several documents."""
    length = options.lengths[0]
    documents = torch.arange(length, device=options.device) // (length // 4)
    masks: dict[str, Callable[..., Tensor]] = {
        "causal": lambda b, h, q, k: q >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
        "documents": lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]),
    }
    for name, mask in masks.items():
        for run in (1, 2):
            torch.compiler.reset()
            start_s = time.perf_counter()
            block_mask = create_block_mask(mask, None, None, length, length, options.device)
            given = inputs(options, length)
            compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False, options=compiler_options())
            output = compiled(*given[:3], block_mask=block_mask, enable_gqa=options.heads != options.kv_heads)
            torch.autograd.grad(output, given[:3], given[3])
            if options.device == "cuda":
                torch.cuda.synchronize()
            yield {"mask": name, "run": run, "seconds": time.perf_counter() - start_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=lambda text: [*map(int, text.split(","))], default=[1024, 4096, 16384])
    for name, default in (("heads", 40), ("kv-heads", 8), ("head-dim", 128), ("tokens", 16384)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--flex", action="store_true")
    options = parser.parse_args()
    report: dict[str, Any] = {"commit": commit(), "hardware": hardware(options.device), "versions": versions()}
    report |= {"options": vars(options) | {"out": str(options.out)}, "kernels": [], "flex": []}
    results = [("kernels", measure(*kernel, options)) for kernel in kernels()]
    for kind, found in [*results, *(("flex", f) for f in (compile_flex(options) if options.flex else ()))]:
        report[kind].append(found)
        print(json.dumps(found), flush=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
