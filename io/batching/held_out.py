"""Serves held-out data in numbered batches: every window of every source once, unshuffled."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from megatrain_ray.io.batching.batch_stream import Batch, assemble
from megatrain_ray.io.batching.windows import Rows, Windows


class HeldOut:
    """Holds the batches of one source after the other. A source's last batch may have fewer rows than the others."""

    def __init__(self, sources: Sequence[Windows], *, batch_size: int, micro_batch_size: int) -> None:
        """Divide the windows of all sources into batches of `batch_size` rows, a multiple of `micro_batch_size`.

        Rows without tokens fill the last micro-batch of a source.
        """
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
        return any(source.joins_documents for source in self._sources)

    def source_of(self, index: int) -> int:
        return bisect.bisect_right(self._ends, index)

    def batch(self, index: int) -> Batch:
        """Return batch `index`, from 0 to num_batches - 1. Its number of rows is a multiple of the micro-batch size."""
        number = self.source_of(index)
        source = self._sources[number]
        before = self._ends[number - 1] if number else 0
        first = (index - before) * self._batch_size
        rows = source.rows(np.arange(first, min(first + self._batch_size, source.num_windows)))
        return assemble(_filled(rows, self._micro_batch_size))


def _filled(rows: Rows, multiple: int) -> Rows:
    pads = Rows.of_pads(-len(rows.ids) % multiple, rows.ids.shape[1] - 1)
    return Rows(*(np.concatenate(parts) for parts in zip(rows, pads, strict=True)))
