"""Defines what a step is given, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megatrain_ray.engine.device.device import MemoryStatistics
from megatrain_ray.engine.model.chunked_loss import Objective
from megatrain_ray.engine.model.micro_batch import MicroBatch
from megatrain_ray.io.batching.batch import BatchCounts


@dataclass(frozen=True)
class StepInput:
    """Holds this rank's share of a step."""

    step: int  # from 1
    micro_batches: tuple[MicroBatch, ...]
    # `Batch.total_weight` of the step, over all ranks and micro-batches. In a captured step it changes from step to
    # step, so it is an FP32 scalar on the device.
    total_weight: float | torch.Tensor
    dropout_seed: int
    objective: Objective = field(default_factory=Objective)
    counts: BatchCounts | None = None  # of the step, over all ranks; None: the objective is of single tokens


@dataclass(frozen=True)
class StepOutput:
    """Holds the loss and the gradient norm of a step."""

    loss: float
    # By name: the plain cross-entropy in the loss if the loss has other terms; of documents, rewards and the like.
    metrics: dict[str, float]
    grad_norm: float  # of all gradients, before clipping
    bad_parameter: str | None  # the first in model order whose gradient is not finite; None if all are finite

    @property
    def skipped(self) -> bool:
        return self.bad_parameter is not None


class Submitted(NamedTuple):
    """Holds the device tensor of a submitted step that the host has yet to read.

    values: 1-D FP32 on the device, for all ranks: the parts of each metric, then the terms whose sum is the loss, then
        the gradient norm.
    counts: number of parts of each metric, by name.
    """

    values: torch.Tensor
    counts: dict[str, int]


@dataclass(frozen=True)
class StepReport(StepOutput):
    """Reports the result, time and memory of one step."""

    step: int
    step_s: float
    exposed_s: dict[str, float]  # seconds that the compute stage waited, by cause
    memory: MemoryStatistics
