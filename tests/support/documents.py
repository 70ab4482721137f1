"""Makes batches of the same three documents: all in one row, or each in a row of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain_ray.io.batching.batch import Batch
from tests.support.family_models import NUM_IDS

LENGTHS = (7, 4, 9)
SEQ_LEN = sum(LENGTHS)


def documents(step: int) -> list[Tensor]:
    """Ids of each document and one more, which is the last target."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(3, NUM_IDS, (length + 1,), generator=generator) for length in LENGTHS]


def packed(step: int) -> Batch:
    """Return a batch with all documents in one row."""
    parts = documents(step)
    return Batch(
        input_ids=torch.cat([part[:-1] for part in parts])[None],
        targets=torch.cat([part[1:] for part in parts])[None],
        positions=torch.cat([torch.arange(n) for n in LENGTHS])[None],
        num_supervised=SEQ_LEN,
        num_tokens=SEQ_LEN,
        sum_squared_lengths=sum(n * n for n in LENGTHS),
    )


def separate(step: int) -> Batch:
    """Return a batch with each document in a row of its own, padded."""
    parts = documents(step)
    ids, targets = torch.zeros(3, SEQ_LEN, dtype=torch.int64), torch.full((3, SEQ_LEN), -100)
    for row, part in enumerate(parts):
        ids[row, : part.numel() - 1], targets[row, : part.numel() - 1] = part[:-1], part[1:]
    return Batch(ids, targets, None, SEQ_LEN, SEQ_LEN, sum(n * n for n in LENGTHS))
