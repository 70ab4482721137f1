"""Defines what the driver and the GPU workers tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatrain_ray.engine.device.rank_group import Rendezvous
from megatrain_ray.io.tokens.token_files import Logprobs


@dataclass(frozen=True)
class Progress:
    """Counts how far training has come."""

    step: int  # completed updates, skipped ones included
    adam_step: int  # those that AdamW counted, that is all that were not skipped

    @property
    def num_skipped(self) -> int:
        return self.step - self.adam_step


@dataclass(frozen=True)
class RankInfo:
    """Describes one of several GPU workers."""

    rank: int
    place: Rendezvous  # where rank 0 listens for the others
    address: str  # of the worker's own host


@dataclass(frozen=True)
class StepResult:
    """Holds the row of metrics.jsonl of a step, and where training stands after it."""

    row: dict[str, Any]
    progress: Progress


@dataclass(frozen=True)
class HeldOutLoss:
    """Holds the weighted sum of the cross-entropy over the supervised tokens of a batch, or its documents' losses.

    num_supervised: number of these tokens.
    total_weight: sum of their loss weights, or what the sum over documents is divided by.
    metrics: further sums, by name, each with what it is divided by.
    num_tokens: inputs of the batch that are no pads.
    logprobs: of each target, [rows, seq_len], 0 if it is not supervised, in place of the sum; None: the sum. Of a
        teacher a third dimension has each of them, and then the bits of its record.
    """

    total: float
    num_supervised: int
    total_weight: float
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    num_tokens: int = 0
    logprobs: Logprobs | None = None
