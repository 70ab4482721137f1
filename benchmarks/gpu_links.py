"""Measures how fast the GPUs of this machine exchange data, by copies and by NCCL, and how that slows down products.

    python -m benchmarks.gpu_links OUT.json [--gpus 2] [--commit ID]

The exchange is that of a layer of 7.6B: 466 MB of working copy are gathered, 932 MB of FP32 sums are reduce-scattered,
as runs do it. Rates are bytes that each GPU receives from the others, per second. `beside` is the share of their speed
that products of 8192 × 8192 keep while four exchanges run on another stream.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from megatrain_ray.engine.device.cuda_info import PeerCopies
from megatrain_ray.engine.device.rank_group import Meeting, RankGroup, Rendezvous
from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.machine.environment import commit, hardware, versions

ELEMENTS = 233_057_280  # of a layer of 7.6B, a multiple of 64 × 8
ROUNDS, CALLS = 7, 4
PRODUCTS = 24
WIDTH = 8192
Work = Callable[[], object]


def seconds(work: Work) -> float:
    """Return the seconds of one call: the median of rounds of CALLS calls, without the first round."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(CALLS):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start_s) / CALLS)
    return statistics.median(times[1:])


class Exchanges:
    """Does what one rank does with a layer: working copies are all-gathered, sums are reduce-scattered."""

    def __init__(self, ranks: RankGroup) -> None:
        edges = [ELEMENTS * k // ranks.size for k in range(ranks.size + 1)]
        self._ranks = ranks
        self._parts = [ElementRange(a, b) for a, b in itertools.pairwise(edges)]
        self._working = torch.randn(ELEMENTS, device="cuda").to(torch.bfloat16)
        self._sums = torch.randn(ELEMENTS, device="cuda")
        self._factor = torch.randn(WIDTH, WIDTH, device="cuda").to(torch.bfloat16)
        self._side = torch.cuda.Stream(priority=-1)

    def gather(self) -> None:
        self._ranks.all_gather(self._working, self._parts)

    def scatter(self) -> None:
        self._ranks.sum_part(self._sums, self._parts[self._ranks.rank])

    def products(self) -> None:
        for _ in range(PRODUCTS):
            torch.mm(self._factor, self._factor)

    def beside(self, work: Work) -> None:
        """Compute the products while `work` runs four times on another stream."""
        with torch.cuda.stream(self._side):
            for _ in range(4):
                work()
        self.products()


def measured(exchanges: Exchanges, size: int) -> dict[str, float]:
    """Return seconds, rates and shares by name. `size`: number of ranks."""
    products_s = seconds(exchanges.products)
    found = {"product_tflops": PRODUCTS * 2e-12 * WIDTH**3 / products_s}
    of_each = ("all_gather", exchanges.gather, 2 * ELEMENTS), ("reduce_scatter", exchanges.scatter, 4 * ELEMENTS)
    for name, work, num_bytes in of_each:
        alone_s, beside_s = seconds(work), seconds(partial(exchanges.beside, work))
        found[f"{name}_s"] = alone_s
        found[f"{name}_bytes_per_s"] = (1 - 1 / size) * num_bytes / alone_s
        found[f"products_beside_4_of_{name}"] = products_s / beside_s
    return found


def run_rank(rank: int, size: int, place: Rendezvous, out: Path) -> None:
    """Run one rank in this process. Rank 0 writes what it measured to `out`."""
    torch.cuda.set_device(rank)
    ranks = RankGroup(torch.device("cuda", rank), place, rank, size, 120.0, gathers=True)
    found = measured(Exchanges(ranks), size)
    if rank == 0:
        out.write_text(json.dumps(found))
    ranks.close()


def of_ranks(num_gpus: int) -> dict[str, float]:
    """Measure with one process for each GPU, and return what rank 0 found. Raises RuntimeError if a process failed."""
    meeting, context = Meeting(), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        for_ranks = [(rank, num_gpus, meeting.place, out) for rank in range(num_gpus)]
        ranks = [context.Process(target=run_rank, args=each) for each in for_ranks]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            raise RuntimeError(f"ranks ended with {[each.exitcode for each in ranks]}")
        found: dict[str, float] = json.loads(out.read_text())
    return found


def copies() -> dict[str, float]:
    """Return the bytes per second of copies in both directions at once, by the size of a copy."""
    found = {}
    for mib in (16, 64, 256):
        exchange = PeerCopies(mib << 20)
        found[f"{mib} MiB"] = (mib << 20) * 8 / seconds(partial(exchange.run, 8))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    report = {"commit": options.commit or commit(), "hardware": hardware("cuda"), "versions": versions()}
    found = of_ranks(options.gpus) | {"copies_bytes_per_s": copies()}
    options.out.write_text(json.dumps(report | found, indent=1) + "\n")
    print(options.out.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
