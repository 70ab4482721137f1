"""The hardware profile: how fast a machine moves, computes and updates. What a plan's prediction is made of.

Measured once (measure/measure_profile.py), or written by hand for a machine that is not here; docs/hardware_profile.md.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

# Wide enough for any machine, and such that seconds made of them are neither infinite nor 0.
Rate = Annotated[float, Field(ge=1e-6, le=1e24, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]


@dataclass(frozen=True)
class RatePoint:
    """`size`: of what was measured; `per_s`: at that size."""

    size: Rate
    per_s: Rate


RateCurve = Annotated[tuple[RatePoint, ...], Field(min_length=1)]


@dataclass(frozen=True)
class MachineName:
    """What a profile belongs to: whatever of this changes, rates may. `gpu`, `driver`: empty without one.

    Not RAM: on some virtual machines what the kernel shows of it grows as it is touched, and rates do not depend on it.
    """

    gpu: str
    driver: str
    torch: str
    cpu: str
    num_cpus: int

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.gpu, f"{self.num_cpus} × {self.cpu or 'unnamed CPU'}")))


@dataclass(frozen=True)
class HardwareProfile:
    """Rates of one machine. All are of one thing alone but for those with `both` and `busy` in their names, of disks
    and of links between GPUs and hosts, where both directions run."""

    version: Literal[1]
    machine: MachineName
    h2d_bytes_per_s: Rate
    d2h_bytes_per_s: Rate
    both_bytes_per_s: Rate  # each way, while the other one runs too
    copy_s: Seconds  # what a copy takes however small it is
    triad_bytes_per_s: Rate  # of host memory: STREAM's triad on all cores, 16 bytes an element
    adamw_per_s: Rate  # parameters: split bf16 masters, bf16 gradient, all cores
    adamw_busy_per_s: Rate  # the same while both copies run
    device_bytes_per_s: Rate  # of device memory: what a copy inside of it reads and writes
    launch_s: Seconds  # of each operator in a row of small ones
    matmul: Annotated[Mapping[str, RateCurve], Field(min_length=1)]  # by train.precision; size and rate: FLOPs
    attention: RateCurve  # size: tokens of a sequence; FLOP/s of forward and backward, causal counted once
    disk_bytes_per_s: Rate | None = None  # of the disk of spill.path, read and written at the same time, both together
    disk_plain_bytes_per_s: Rate | None = None  # where that is of what is packed: of the rest
    disk_direct_bytes_per_s: Rate | None = None  # of activations that pass between it and the device's own memory
    # What a GPU has from the others of its host while it sends as much, by copies; None: nobody measured it.
    gpu_link_bytes_per_s: Rate | None = None
    host_link_bytes_per_s: Rate | None = None  # the same of a host and other hosts; is never measured

    def to_json(self) -> str:
        return TypeAdapter(HardwareProfile).dump_json(self, indent=1).decode() + "\n"

    @staticmethod
    def from_json(text: str) -> HardwareProfile:
        """Raises pydantic.ValidationError for text that is no profile of this version."""
        return TypeAdapter(HardwareProfile).validate_json(text)

    def matmul_s(self, precision: str, flops: float) -> float:
        """Seconds of a product of so many FLOPs. A precision that is not there has the rates of the first."""
        curve = self.matmul.get(precision) or next(iter(self.matmul.values()))
        return flops / interpolate(curve, flops) if flops else 0.0

    def attention_s(self, seq_len: int, flops: float) -> float:
        """Seconds of the attention of sequences of this length, so many FLOPs of forward or backward."""
        return flops / interpolate(self.attention, seq_len)


def interpolate(curve: Sequence[RatePoint], size: float) -> float:
    """The rate at a size: straight between points on logarithmic axes; below the first in proportion to the size, as
    what costs a launch however small it is; above the last as there."""
    points = sorted(curve, key=lambda point: point.size)
    k = bisect.bisect_left([point.size for point in points], size)
    if k == 0:
        return points[0].per_s * size / points[0].size
    if k == len(points):
        return points[-1].per_s
    low, high = points[k - 1], points[k]
    share = math.log(size / low.size) / math.log(high.size / low.size)
    return low.per_s * math.exp(share * math.log(high.per_s / low.per_s))


def _cubes(rates: Mapping[int, float]) -> tuple[RatePoint, ...]:
    """From FLOP/s of products of square matrices, by their width."""
    return tuple(RatePoint(2.0 * n**3, per_s) for n, per_s in rates.items())


# One H200 with PCIe 5 and 16 cores, torch 2.11: copies, updates, attention and the largest products were measured on
# it, the small ones are guesses.
TYPICAL_GPU = HardwareProfile(
    version=1,
    machine=MachineName("NVIDIA H200", "", "2.11", "server core", 16),
    h2d_bytes_per_s=55e9,
    d2h_bytes_per_s=55e9,
    both_bytes_per_s=50.8e9,
    copy_s=4e-6,
    triad_bytes_per_s=171e9,
    adamw_per_s=5.6e9,
    adamw_busy_per_s=4.2e9,
    device_bytes_per_s=4.0e12,
    launch_s=6e-6,
    matmul={
        "bf16": _cubes({256: 6e12, 1024: 300e12, 4096: 720e12, 8192: 797e12, 10650: 770e12}),
        "tf32": _cubes({256: 3e12, 1024: 150e12, 4096: 330e12, 8192: 380e12}),
        "fp32": _cubes({256: 2e12, 1024: 30e12, 4096: 48e12}),
    },
    attention=(RatePoint(1024, 348e12), RatePoint(4096, 528e12), RatePoint(32768, 561e12)),
)

# A guess of a desktop: the CPU device is there for tests and small models.
TYPICAL_CPU = HardwareProfile(
    version=1,
    machine=MachineName("", "", "", "desktop core", 8),
    h2d_bytes_per_s=8e9,
    d2h_bytes_per_s=8e9,
    both_bytes_per_s=6e9,
    copy_s=30e-6,
    triad_bytes_per_s=30e9,
    adamw_per_s=0.8e9,
    adamw_busy_per_s=0.5e9,
    device_bytes_per_s=20e9,
    launch_s=8e-6,
    matmul={
        "bf16": _cubes({64: 5e9, 256: 100e9, 1024: 200e9}),
        "tf32": _cubes({64: 10e9, 256: 200e9, 1024: 400e9}),
        "fp32": _cubes({64: 10e9, 256: 200e9, 1024: 400e9}),
    },
    attention=(RatePoint(128, 50e9), RatePoint(1024, 150e9)),
)


# A guess for one NVMe drive, which writes 2.9 GB/s and reads 4.0 GB/s, each alone.
TYPICAL_DISK_BYTES_PER_S = 3e9


def typical(device: str) -> HardwareProfile:
    """Built-in rates, for a plan of a machine that nobody measured."""
    return TYPICAL_GPU if device == "cuda" else TYPICAL_CPU
