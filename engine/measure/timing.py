"""Times work that is repeated, and says how long and how large measurements are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatrain_ray.engine.device.device import Device

CALLS = 3  # a measurement times at least so many rounds
ROUNDS = 4  # a measurement's time is divided into about so many rounds; the host waits only at the end of a round


@dataclass(frozen=True)
class Effort:
    """Says how much is measured. With the defaults an H200 or a small CPU takes a few seconds."""

    budget_s: float = 0.1  # time of each measurement
    warm_s: float = 2.5  # load before the first product
    sustained_s: float = 0.7  # time of each measurement of products in bf16; of others, updates and attention half
    slow_s: float = 0.05  # after a product or an attention that takes longer, no larger one is measured
    # Size of the parameter that is updated: 1.9 GB of state. Of a quarter of it an H100's host had much in its cache of
    # 300 MB, and seemed to update 7.9 Gparam/s, where a step made 5.7.
    elements: int = 1 << 27
    copy_bytes: int = 64 << 20  # size of a copy, about a layer's weights; the full rate is reached from 16 MiB on
    device_bytes: int = 256 << 20
    widths: tuple[int, ...] = (64, 256, 1024, 2048, 4096, 8192, 12288)
    lengths: tuple[int, ...] = (128, 1024, 4096, 16384, 32768)
    rows: tuple[int, ...] = (64, 256, 1024, 4096)  # of an expert, in a grouped product


def median_s(work: Callable[[int], object], budget_s: float) -> float:
    """Return the median seconds of `work`, which does it as often as its argument says, then waits for all of it."""
    return statistics.median(times_s(work, budget_s))


def times_s(work: Callable[[int], object], budget_s: float) -> list[float]:
    """Return the seconds of `work` in each of several rounds, which take `budget_s` seconds together.

    The first call allocates memory, and does not count. The second one determines how often a round repeats the work,
    so that waiting at its end costs little.
    """
    for count in (1, 1):
        once_s = seconds_of(partial(work, count))
    count = max(1, int(budget_s / ROUNDS / once_s))
    times: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(times) < CALLS or time.perf_counter() < end_s:
        times.append(seconds_of(partial(work, count)) / count)
    return times


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of one call of `work`."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def repeated(work: Callable[[], object], device: Device | None = None) -> Callable[[int], None]:
    """Return a function that does the work as often as its argument says, then waits for the device, if any."""

    def run(count: int) -> None:
        for _ in range(count):
            work()
        if device is not None:
            device.record().synchronize()

    return run
