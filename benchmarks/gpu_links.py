"""How fast the GPUs of this machine exchange, by copies and by NCCL as runs use it, and what that costs products.

    python -m benchmarks.gpu_links OUT.json [--gpus 2] [--commit ID]

A layer of 7.6B: 466 MB of working copy that are gathered, 932 MB of FP32 sums that are reduce-scattered. Rates are
bytes that each GPU has from the others, per second. `beside`: what share of their speed products of 8192 × 8192 have
while four exchanges run on another stream.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatrain_ray.engine.cuda_device import PeerCopies
from megatrain_ray.engine.flat_layout import Span
from megatrain_ray.engine.rank_group import Meeting, Place, RankGroup
from megatrain_ray.surroundings import commit, hardware, versions

ELEMENTS = 233_057_280  # of a layer of 7.6B, a multiple of 64 × 8
ROUNDS, CALLS = 7, 4
PRODUCTS = 24
WIDTH = 8192
Work = Callable[[], object]


def seconds(work: Work) -> float:
    """Of one call, the median of rounds of several."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(CALLS):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start_s) / CALLS)
    return statistics.median(times[1:])


def of_rank(rank: int, size: int, place: Place, out: Path) -> None:
    """What one process measures; the first one writes it down."""
    torch.cuda.set_device(rank)
    ranks = RankGroup(torch.device("cuda", rank), place, rank, size, 120.0, gathers=True)
    edges = [ELEMENTS * k // size for k in range(size + 1)]
    parts = [Span(a, b) for a, b in itertools.pairwise(edges)]
    working = torch.randn(ELEMENTS, device="cuda").to(torch.bfloat16)
    sums = torch.randn(ELEMENTS, device="cuda")
    factor = torch.randn(WIDTH, WIDTH, device="cuda").to(torch.bfloat16)
    side = torch.cuda.Stream(priority=-1)

    def gather() -> None:
        ranks.all_gather(working, parts)

    def scatter() -> None:
        ranks.sum_part(sums, parts[rank])

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(factor, factor)

    def beside(work: Work) -> Work:
        def both() -> None:
            with torch.cuda.stream(side):
                for _ in range(4):
                    work()
            products()

        return both

    products_s = seconds(products)
    found: dict[str, float] = {"product_tflops": PRODUCTS * 2e-12 * WIDTH**3 / products_s}
    for name, work, num_bytes in (("all_gather", gather, 2 * ELEMENTS), ("reduce_scatter", scatter, 4 * ELEMENTS)):
        alone_s, beside_s = seconds(work), seconds(beside(work))
        found[f"{name}_s"] = alone_s
        found[f"{name}_bytes_per_s"] = (1 - 1 / size) * num_bytes / alone_s
        found[f"products_beside_4_of_{name}"] = products_s / beside_s
    if rank == 0:
        out.write_text(json.dumps(found))
    ranks.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    meeting, context = Meeting(), multiprocessing.get_context("spawn")
    for_ranks = [(rank, options.gpus, meeting.place, options.out) for rank in range(options.gpus)]
    ranks = [context.Process(target=of_rank, args=each) for each in for_ranks]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    copies: dict[str, float] = {}
    for mib in (16, 64, 256):
        exchange = PeerCopies(mib << 20)
        copies[f"{mib} MiB"] = (mib << 20) * 8 / seconds(lambda each=exchange: each.run(8))  # type: ignore[misc]
    found = json.loads(options.out.read_text())
    report = {"commit": options.commit or commit(), "hardware": hardware("cuda"), "versions": versions()}
    options.out.write_text(json.dumps(report | found | {"copies_bytes_per_s": copies}, indent=1) + "\n")
    print(options.out.read_text())
    return int(any(each.exitcode for each in ranks))


if __name__ == "__main__":
    sys.exit(main())
