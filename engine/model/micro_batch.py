"""Defines the micro-batch, the input of one forward and backward of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatrain_ray.io.batching.batch_stream import Batch


@dataclass(frozen=True)
class MicroBatch:
    """Holds the tokens of one micro-batch, in host memory.

    input_ids: int64 [B, T].
    targets: int64 [B, T]; a target of -100 is not supervised.
    positions: int64 [B, T], beginning at 0 in every document of a row; None: each row is one document.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Return whether a row holds several documents."""
        positions = self.positions
        return positions is not None and bool((positions[:, 1:] != positions[:, :-1] + 1).any())


def micro_batches_of(batch: Batch, size: int) -> tuple[MicroBatch, ...]:
    """Return the sequences of an update as micro-batches of `size`. All of them have positions or none has."""
    ids, targets = torch.split(batch.input_ids, size), torch.split(batch.targets, size)
    positions: Sequence[torch.Tensor | None] = [None] * len(ids)
    if batch.positions is not None:
        positions = torch.split(batch.positions, size)
    return tuple(map(MicroBatch, ids, targets, positions))
