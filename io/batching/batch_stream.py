"""Draws batches of windows in a shuffled order, with an exact position to save and to resume from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from megatrain_ray.io.batching.window_order import WindowOrder
from megatrain_ray.io.batching.windows import Rows, Windows

IGNORED = -100  # a target that is not supervised


@dataclass(frozen=True, eq=False)
class Batch:
    """Holds the sequences of one update.

    A target is the token after its input in the same document, or -100 if there is none or if it is not supervised.
    """

    input_ids: torch.Tensor  # int64 [batch, seq_len]
    targets: torch.Tensor  # int64 [batch, seq_len]
    # int32 [batch, seq_len], number of the document within the row (0, 1, …), -1 for pads; None: one document a row
    segments: torch.Tensor | None
    num_supervised: int  # targets that count in the loss
    num_tokens: int  # inputs that are no pads
    sum_squared_lengths: int  # Σ over the documents of all rows of (number of inputs)²


class Stream(Protocol):
    """Yields batches without end. They depend only on data, seed and position."""

    def next_batch(self) -> Batch: ...

    def skip(self, num_batches: int) -> None:
        """Go on by this many batches without making them."""

    @property
    def joins_documents(self) -> bool:
        """Return whether a row may hold several documents."""

    @property
    def position(self) -> dict[str, Any]:
        """Return the position of the next batch and a fingerprint of the data, as data for JSON and for `seek`."""

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises ConfigError for one of other data or outside this data."""


class BatchStream:
    """Draws the windows of one source epoch after epoch. A batch may span epochs. The state is (epoch, cursor)."""

    def __init__(self, windows: Windows, *, batch_size: int, shuffle: bool, seed: int) -> None:
        self._windows = windows
        self._batch_size = batch_size
        self._order = WindowOrder(windows, shuffle=shuffle, seed=seed)

    @property
    def joins_documents(self) -> bool:
        return self._windows.joins_documents

    @property
    def position(self) -> dict[str, Any]:
        return self._order.position

    def seek(self, position: Mapping[str, Any]) -> None:
        self._order.seek(position)

    def next_batch(self) -> Batch:
        """Return the batch of the next `batch_size` windows."""
        return assemble(self._windows.rows(self._order.draw(self._batch_size)))

    def skip(self, num_batches: int) -> None:
        self._order.skip(num_batches * self._batch_size)


def assemble(rows: Rows) -> Batch:
    """Return windows as inputs and targets. A target is -100 if it is a pad, unsupervised, or in another document."""
    ids, documents, learned = rows
    inputs, real = documents[:, :-1], documents[:, :-1] >= 0
    supervised = learned[:, 1:] & real & (inputs == documents[:, 1:])
    segments = np.where(real, _numbered(inputs), -1).astype(np.int32)
    return Batch(
        input_ids=torch.from_numpy(np.ascontiguousarray(ids[:, :-1])),
        targets=torch.from_numpy(np.where(supervised, ids[:, 1:], IGNORED)),
        segments=torch.from_numpy(segments) if segments.max() > 0 else None,
        num_supervised=int(supervised.sum()),
        num_tokens=int(real.sum()),
        sum_squared_lengths=_sum_squared_lengths(segments),
    )


def _numbered(documents: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Replace the documents' numbers in the corpus by 0, 1, … within each row."""
    changes = np.zeros_like(documents)
    changes[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return changes.cumsum(1)


def _sum_squared_lengths(segments: np.ndarray[Any, Any]) -> int:
    rows, columns = segments.shape
    lengths = np.bincount((segments + columns * np.arange(rows)[:, None])[segments >= 0])
    return int((lengths * lengths).sum())
