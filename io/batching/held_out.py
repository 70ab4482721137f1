"""Held-out data: every window of every source once, as they lie, in batches that can be asked for by number."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from megatrain_ray.io.batching.batch_stream import Batch, assemble
from megatrain_ray.io.batching.windows import PAD, Rows, Windows


class HeldOut:
    """Batches of one source after the other; a source's last batch may have fewer rows than the others."""

    def __init__(self, sources: Sequence[Windows], *, batch_size: int, micro_batch_size: int) -> None:
        """`batch_size`: a multiple of `micro_batch_size`. Rows without tokens fill the last micro-batch of a source."""
        self._sources = sources
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        counts = [-(-source.num_windows // batch_size) for source in sources]
        self._ends = list(accumulate(counts))

    @property
    def num_batches(self) -> int:
        return self._ends[-1]

    @property
    def joins_documents(self) -> bool:
        """Whether a row may hold several."""
        return any(source.joins_documents for source in self._sources)

    def source_of(self, index: int) -> int:
        """The number of the source that a batch is of."""
        return bisect.bisect_right(self._ends, index)

    def batch(self, index: int) -> Batch:
        """Of index 0 … num_batches - 1. Rows: a multiple of the micro-batch size."""
        number = self.source_of(index)
        source = self._sources[number]
        before = self._ends[number - 1] if number else 0
        first = (index - before) * self._batch_size
        rows = source.rows(np.arange(first, min(first + self._batch_size, source.num_windows)))
        return assemble(_filled(rows, self._micro_batch_size))


def _filled(rows: Rows, multiple: int) -> Rows:
    missing = -len(rows.ids) % multiple
    shape = (missing, rows.ids.shape[1])
    nothing = Rows(np.full(shape, PAD), np.full(shape, -1), np.zeros(shape, np.bool_))
    return Rows(*(np.concatenate([there, new]) for there, new in zip(rows, nothing, strict=True)))
