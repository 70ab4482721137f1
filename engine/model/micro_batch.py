"""What one forward and one backward of the whole model are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatrain_ray.io.batching.batch_stream import Batch
from megatrain_ray.io.batching.segments import positions_of


@dataclass(frozen=True)
class MicroBatch:
    """input_ids and targets: int64 [B, T] in host memory; a target of -100 is not supervised. positions: int64 [B, T]
    that begin at 0 in every document of a row; None: a row is one document."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether a row holds several documents."""
        positions = self.positions
        return positions is not None and bool((positions[:, 1:] != positions[:, :-1] + 1).any())


def micro_batches_of(batch: Batch, size: int) -> tuple[MicroBatch, ...]:
    """The sequences of an update, `size` at a time. All of them have positions or none has."""
    ids, targets = torch.split(batch.input_ids, size), torch.split(batch.targets, size)
    positions: Sequence[torch.Tensor | None] = [None] * len(ids)
    if batch.segments is not None:
        positions = torch.split(positions_of(batch.segments), size)
    return tuple(map(MicroBatch, ids, targets, positions))
