"""What a plan is expected to cost: the seconds of a step, where they go, and the bytes it moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain_ray.engine.device.hardware_profile import HardwareProfile

# Of the disk, that reads of working copies are predicted to have: as if updates and gradients, which are there then,
# too, always had the rest.
WEIGHTS_SHARE = 0.5


@dataclass(frozen=True)
class Prediction:
    """A step in the steady state, the second of two. `rates`: of which machine; `is_measured`: on this one.

    `compute_s` by operation (forward, recompute, loss, backward, update, orthogonalize), `exposed_s` by cause as in
    metrics.jsonl: together `step_s`. `busy_s`: of each stage, whatever hides it; the bottleneck is the busiest one.
    `profile`: the rates that all of it was made of; of a plan of an earlier version None.
    """

    rates: str
    is_measured: bool
    step_s: float
    model_tflops: float
    compute_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    busy_s: Mapping[str, float]
    bottleneck: str  # compute, h2d, d2h, all-gather, optimizer or disk
    h2d_bytes: int
    d2h_bytes: int
    profile: HardwareProfile | None = None

    @property
    def disk_s(self) -> float:
        """Of the disk at work for all that is moved there, at its whole rate."""
        return self.busy_s.get("disk", 0.0) + WEIGHTS_SHARE * self.busy_s.get("weights", 0.0)
