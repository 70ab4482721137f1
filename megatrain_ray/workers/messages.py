"""Defines what the driver and the GPU workers tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatrain_ray.engine.device.rank_group import Rendezvous


@dataclass(frozen=True)
class Progress:
    """Counts how far training has come.

    step: completed updates, skipped ones included.
    adam_step: those that AdamW counted, that is all that were not skipped.
    """

    step: int
    adam_step: int

    @property
    def num_skipped(self) -> int:
        return self.step - self.adam_step


@dataclass(frozen=True)
class RankInfo:
    """Describes one of several GPU workers.

    place: where rank 0 listens for the others.
    address: of the worker's own host.
    """

    rank: int
    place: Rendezvous
    address: str


@dataclass(frozen=True)
class StepResult:
    """Holds the result of one step.

    row: of metrics.jsonl.
    progress: after the step.
    """

    row: dict[str, Any]
    progress: Progress


@dataclass(frozen=True)
class HeldOutLoss:
    """Holds the cross-entropy summed over the supervised tokens of a batch, and their number."""

    total: float
    num_supervised: int
