"""Measures AdamW on the host with both kernels, with and without the undo journal, by number of threads.

STREAM's triad is measured beside it, and how fast the kernels copy a layer's state aside for a save.

    python benchmarks/adamw.py OUT.json [--elements N] [--threads 1,8,16] [--repeats N] [--commit ID]
        [--moments bf16]

The state is one layer of N parameters with split bf16 masters and a bf16 gradient. An update counts 26 bytes per
parameter: gradient 2, state 12 read and 12 written. With moments in bf16 it counts 18, because the state has 8. The
triad counts 16 bytes per element (with write-allocate), copies count the bytes of the state once. Rates are those of
the median call.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatrain_ray.engine.layout.flat_layout import FlatLayout, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.adamw import AdamState, AdamWConstants, ParamWeighting, UpdateParams
from megatrain_ray.engine.optimizer.torch_kernel import TorchBlocks
from megatrain_ray.engine.optimizer.undo_log import Journal, ParamSlice, Transaction
from megatrain_ray.engine.optimizer.update_kernel import UpdateKernel, open_kernel
from megatrain_ray.io.arenas.arena_holder import Arena, ArenaHolder
from megatrain_ray.io.words.compile_c import declare, load_compiled

HYPER = AdamWConstants(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
GRADIENT_BYTES, TRIAD_BYTES = 2, 16
TRIAD = Path(__file__).with_name("triad.c")


def seconds(call: Callable[[int], None], repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` calls, after an uncounted call that touches the memory first."""
    times = []
    for index in range(repeats + 1):
        start_s = time.perf_counter()
        call(index)
        times.append(time.perf_counter() - start_s)
    return times[1:]


def rate(call: Callable[[int], None], repeats: int, elements: int, itemsize: int) -> dict[str, Any]:
    times = seconds(call, repeats)
    per_s = elements / statistics.median(times)
    return {"gelements_per_s": per_s / 1e9, "gb_per_s": per_s * itemsize / 1e9, "seconds": times}


def triad(elements: int, num_threads: int, repeats: int) -> dict[str, Any]:
    function = declare(
        load_compiled(TRIAD, ("-O3", "-march=native", "-shared", "-fPIC"), ctypes.CDLL).triad,
        None,
        *[ctypes.c_void_p] * 3,
        ctypes.c_int64,
    )
    arrays = [torch.zeros(elements) for _ in range(3)]
    edges = [elements * k // num_threads for k in range(num_threads + 1)]

    def portion(pool_index: int) -> None:
        start, stop = edges[pool_index], edges[pool_index + 1]
        function(*(array.data_ptr() + 4 * start for array in arrays), stop - start)

    with ThreadPoolExecutor(num_threads) as pool:
        return rate(lambda _: list(pool.map(portion, range(num_threads))) and None, repeats, elements, TRIAD_BYTES)


class Layer:
    """Holds the state of one layer in an arena, as an optimizer shard does."""

    def __init__(self, elements: int, arena: Arena, precision: Precision) -> None:
        self.precision = precision
        self.hyper = replace(HYPER, moments_seed=0 if precision is Precision.BF16_NARROW else None)
        layer = FlatLayout.build("layer", [ParameterSpec("w", "w", (elements,))])
        self.shard = ShardLayout(ModelLayout((layer,), ("w",)), 0, 1)
        memory, tensors, start = torch.frombuffer(arena.buffer, dtype=torch.uint8), [], 0
        for dtype in (torch.bfloat16, *(dtype for _, dtype in precision.state_kinds), torch.bfloat16):
            stop = start + layer.size * dtype.itemsize
            tensors.append(memory[start:stop].view(dtype)[:elements])
            start = stop
        *state, self.gradient = tensors
        self.state = state
        state[0].fill_(0.02)
        self.gradient.fill_(1e-3)
        self.parts = [ParamSlice(AdamState(*state), 0, ParamWeighting(1.0, HYPER.weight_decay), 0)]

    def kernels(self, num_threads: int) -> Iterator[UpdateKernel]:
        yield open_kernel(num_threads, self.hyper)
        yield TorchBlocks(num_threads, self.hyper)

    def update(self, kernel: UpdateKernel, journal: Journal | None) -> Callable[[int], None]:
        params = UpdateParams(10, 10, 1e-4, 0.3)

        def call(index: int) -> None:
            kernel.update(self.parts, self.gradient, params, Transaction(journal, 1 + index) if journal else None)

        return call


def copies(layer: Layer, num_threads: int, repeats: int, elements: int) -> Iterator[dict[str, Any]]:
    state_bytes = layer.precision.element_bytes
    with closing(ArenaHolder.create({"copy": state_bytes * elements})) as holder:
        memory, pairs, start = torch.frombuffer(holder.map("copy").buffer, dtype=torch.uint8), [], 0
        for source in (tensor.view(torch.uint8) for tensor in layer.state):
            pairs.append((memory[start : start + source.nbytes], source))
            start += source.nbytes
        for kernel in layer.kernels(num_threads):
            with closing(kernel):
                measured = rate(lambda _, kernel=kernel: kernel.copy(pairs), repeats, elements, state_bytes)  # type: ignore[misc]
                yield {"kernel": kernel.name, "threads": num_threads} | measured


def updates(layer: Layer, num_threads: int, repeats: int, elements: int) -> Iterator[dict[str, Any]]:
    update_bytes, precision = GRADIENT_BYTES + 2 * layer.precision.element_bytes, layer.precision
    for kernel in layer.kernels(num_threads):
        with closing(kernel):
            for is_logged in (True, False):
                size = Journal.num_bytes(layer.shard, precision, num_threads)
                with closing(ArenaHolder.create({"journal": size})) as holder:
                    buffer = holder.map("journal").buffer
                    journal = Journal(buffer, layer.shard, precision, num_threads) if is_logged else None
                    measured = rate(layer.update(kernel, journal), repeats, elements, update_bytes)
                yield {"kernel": kernel.name, "journal": is_logged, "threads": num_threads} | measured


def report(rows: list[dict[str, Any]], copy_rows: list[dict[str, Any]], triad_row: dict[str, Any]) -> None:
    print(f"{triad_row['threads']} threads: triad {triad_row['gb_per_s']:.1f} GB/s")
    for row in rows:
        share = row["gb_per_s"] / triad_row["gb_per_s"]
        logged = "with journal" if row["journal"] else "without"
        print(f"  {row['kernel']}, {logged}: {row['gelements_per_s']:.3f} Gparam/s = {share:.2f} of triad", flush=True)
    for row in copy_rows:
        print(f"  {row['kernel']}: copies {row['gb_per_s']:.1f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--elements", type=int, default=233_000_000)
    parser.add_argument("--threads", type=lambda text: [int(n) for n in text.split(",")], default=[os.cpu_count() or 1])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--moments", choices=("fp32", "bf16"), default="fp32")
    arguments = parser.parse_args()
    machine = {"commit": arguments.commit, "torch": torch.__version__, "python": platform.python_version()}
    result: dict[str, Any] = {
        "machine": machine | {"processor": processor(), "cores": os.cpu_count()},
        "elements": arguments.elements,
        "moments": arguments.moments,
        "triad": [],
        "updates": [],
        "copies": [],
    }
    with closing(ArenaHolder.create({"layer": 14 * (arguments.elements + 4096)})) as holder:
        arena = holder.map("layer")
        arena.populate(max(arguments.threads))
        layer = Layer(arguments.elements, arena, Precision.of("bf16", arguments.moments))
        for num_threads in arguments.threads:
            measured = triad(arguments.elements, num_threads, arguments.repeats)
            result["triad"].append({"threads": num_threads} | measured)
            rows = list(updates(layer, num_threads, arguments.repeats, arguments.elements))
            result["updates"] += rows
            copied = list(copies(layer, num_threads, arguments.repeats, arguments.elements))
            result["copies"] += copied
            report(rows, copied, result["triad"][-1])
            arguments.out.write_text(json.dumps(result, indent=1))


def processor() -> str | None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), None)


if __name__ == "__main__":
    main()
