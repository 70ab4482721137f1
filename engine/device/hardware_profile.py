"""Holds a machine's rates of copies, computation and optimizer updates, from which a plan's step time is predicted.

A profile is measured once, or written by hand for another machine (docs/hardware_profile.md).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

# Wide enough for any machine, and narrow enough that seconds computed from rates are neither infinite nor 0.
Rate = Annotated[float, Field(ge=1e-6, le=1e24, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]


@dataclass(frozen=True)
class RatePoint:
    """Holds the rate `per_s` measured at one `size`."""

    size: Rate
    per_s: Rate


RateCurve = Annotated[tuple[RatePoint, ...], Field(min_length=1)]


@dataclass(frozen=True)
class MachineName:
    """Identifies the machine that a profile belongs to. If any of these fields changes, rates may change.

    RAM is not included: rates do not depend on it, and on some virtual machines it grows as memory is touched.
    """

    gpu: str  # empty without a GPU, as the driver
    driver: str
    torch: str
    cpu: str
    num_cpus: int

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.gpu, f"{self.num_cpus} × {self.cpu or 'unnamed CPU'}")))


@dataclass(frozen=True)
class HardwareProfile:
    """Holds the rates of one machine.

    Each rate is measured while nothing else runs. Exceptions are those with `both` or `busy` in their names, and those
    of disks and of links between GPUs and hosts, where both directions run.
    """

    version: Literal[1]
    machine: MachineName
    h2d_bytes_per_s: Rate
    d2h_bytes_per_s: Rate
    both_bytes_per_s: Rate  # h2d and d2h at the same time: the rate in each direction
    copy_s: Seconds  # fixed cost of one copy, however small it is
    triad_bytes_per_s: Rate  # host memory bandwidth: STREAM's triad on all cores, 16 bytes an element
    adamw_per_s: Rate  # parameters updated per second: split bf16 masters, bf16 gradient, all cores
    adamw_busy_per_s: Rate  # the same while h2d and d2h copies run
    device_bytes_per_s: Rate  # device memory bandwidth: bytes that a copy within the device reads plus writes
    launch_s: Seconds  # per operator, in a sequence of small operators
    matmul: Annotated[Mapping[str, RateCurve], Field(min_length=1)]  # by train.precision, or fp8; FLOPs → FLOP/s
    attention: RateCurve  # tokens of a sequence → FLOP/s of forward and backward, causal counted once
    disk_bytes_per_s: Rate | None = None  # disk of spill.path: sum of reads and writes that run at the same time
    disk_plain_bytes_per_s: Rate | None = None  # rate of uncompressed data, if disk_bytes_per_s is of compressed data
    # Bytes that a GPU receives from the others of its host while it sends as many, by copies; None: not measured.
    gpu_link_bytes_per_s: Rate | None = None
    host_link_bytes_per_s: Rate | None = None  # the same between a host and the other hosts; never measured
    # Each direction while the other one is busy. None, as in files of earlier releases: both_bytes_per_s.
    h2d_busy_bytes_per_s: Rate | None = None
    d2h_busy_bytes_per_s: Rate | None = None
    # Grouped products of experts in bf16, forward and backward: rows of an expert → FLOP/s. None: as other products.
    grouped: RateCurve | None = None
    # Device memory of a process that computes, beside torch's own allocations. None: a guess.
    context_bytes: Annotated[int, Field(ge=0, le=1 << 50)] | None = None

    def to_json(self) -> str:
        return TypeAdapter(HardwareProfile).dump_json(self, indent=1).decode() + "\n"

    @staticmethod
    def from_json(text: str) -> HardwareProfile:
        """Parse a profile. Raises pydantic.ValidationError if the text is not a profile of this version."""
        return TypeAdapter(HardwareProfile).validate_json(text)

    def updates_per_s(self, beside_copies: float) -> float:
        """Return the parameters that the CPU updates in a second. `beside_copies`: as in a Prediction."""
        return self.adamw_per_s + beside_copies * (self.adamw_busy_per_s - self.adamw_per_s)

    def matmul_s(self, precision: str, flops: float) -> float:
        """Return the seconds of a matrix product. A precision without a curve uses the rates of the first curve."""
        curve = self.matmul.get(precision) or next(iter(self.matmul.values()))
        return flops / interpolate(curve, flops) if flops else 0.0

    def grouped_s(self, precision: str, flops: float, rows: float) -> float:
        """Return the seconds of a grouped product of experts that get `rows` rows each."""
        dense_s = self.matmul_s(precision, flops)
        if self.grouped is None or not flops:
            return dense_s
        # Other precisions lose the same share of their rate.
        return dense_s * flops / interpolate(self.grouped, rows) / self.matmul_s("bf16", flops)

    @property
    def busy_h2d_bytes_per_s(self) -> float:
        """Return the rate of copies to the device while others run from it."""
        return self.h2d_busy_bytes_per_s or self.both_bytes_per_s

    @property
    def busy_d2h_bytes_per_s(self) -> float:
        """Return the rate of copies from the device while others run to it."""
        return self.d2h_busy_bytes_per_s or self.both_bytes_per_s

    def attention_s(self, seq_len: int, flops: float) -> float:
        """Return the seconds of a forward or a backward of attention over sequences of `seq_len` tokens."""
        return flops / interpolate(self.attention, seq_len)


def interpolate(curve: Sequence[RatePoint], size: float) -> float:
    """Return the rate at `size`, by linear interpolation on logarithmic axes.

    Below the first point the rate is proportional to the size, as for work that costs one launch however small it is.
    Above the last point the rate is constant.
    """
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
    """Return a curve from FLOP/s of products of square matrices, keyed by their width."""
    return tuple(RatePoint(2.0 * n**3, per_s) for n, per_s in rates.items())


# One H200 with PCIe 5 and 16 cores, torch 2.11. Copies, updates, attention and the largest matrix products were
# measured on it; rates of small products are guesses.
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
        # A guess: seven tenths of the published rate at most.
        "fp8": _cubes({256: 6e12, 1024: 300e12, 4096: 1200e12, 8192: 1380e12}),
        "tf32": _cubes({256: 3e12, 1024: 150e12, 4096: 330e12, 8192: 380e12}),
        "fp32": _cubes({256: 2e12, 1024: 30e12, 4096: 48e12}),
    },
    attention=(RatePoint(1024, 348e12), RatePoint(4096, 528e12), RatePoint(32768, 561e12)),
)

# A guess for a desktop: the CPU device is for tests and small models.
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


# A guess for one NVMe drive that writes 2.9 GB/s and reads 4.0 GB/s when it does only one of them.
TYPICAL_DISK_BYTES_PER_S = 3e9


def typical(device: str) -> HardwareProfile:
    return TYPICAL_GPU if device == "cuda" else TYPICAL_CPU
