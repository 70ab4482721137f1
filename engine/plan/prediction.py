"""Holds what a plan is expected to cost: the seconds of a step, where they go, and the bytes that it moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain_ray.engine.device.hardware_profile import HardwareProfile

# Share of the disk's rate that reads of working copies are predicted to have. Updates and gradients, which use the disk
# at the same time, are taken to always have the rest.
WEIGHTS_SHARE = 0.5


@dataclass(frozen=True)
class Prediction:
    """Predicts a step in the steady state: the second of two simulated steps.

    rates: name of the machine whose rates were used.
    is_measured: whether they were measured on this machine.
    compute_s: seconds by operation (forward, recompute, loss, backward, update, orthogonalize; score: a forward for
        log-probabilities before the step).
    exposed_s: seconds that the compute stream waits, by cause as in metrics.jsonl. With `compute_s` they add up to
        `step_s`.
    busy_s: seconds that each stage works, including what overlaps with other stages. The bottleneck is the busiest one.
    profile: the rates that the prediction was made with; None in plans of earlier versions.
    beside_copies: by how much copies slow the updates by the CPU: 0 not at all, 1 as much as copies in both directions.
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
    beside_copies: float = 0.0

    @property
    def disk_s(self) -> float:
        """Return the seconds that the disk takes for all its transfers at its full rate."""
        return self.busy_s.get("disk", 0.0) + WEIGHTS_SHARE * self.busy_s.get("weights", 0.0)
