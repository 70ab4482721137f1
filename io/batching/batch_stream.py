"""Makes batches of windows: for training in a shuffled order, with a position to resume from, and for evaluation."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch import Batch, BatchKind, assemble, divided
from megatrain_ray.io.batching.corpus import Fingerprint
from megatrain_ray.io.batching.splitmix import splitmix64, splitmix64_chain
from megatrain_ray.io.batching.windows import Rows, Windows

MOST_EPOCHS = 1 << 40  # of a position that a run can have reached


class BatchStream:
    """Draws the windows of one source epoch after epoch. They depend only on the data, the seed and the position.

    A batch may span epochs. The state is (epoch, cursor).
    """

    num_ready = math.inf  # windows that can be drawn without waiting

    def __init__(self, windows: Windows, *, batch_size: int, shuffle: bool, seed: int) -> None:
        self._windows = windows
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._begin(epoch=0)

    @property
    def joins_documents(self) -> bool:
        """Return whether a row may hold several documents."""
        return self._windows.joins_documents

    @property
    def weighted(self) -> bool:
        """Return whether batches have loss weights."""
        return self._windows.corpus.weighted

    @property
    def referenced(self) -> bool:
        """Return whether batches have log-probabilities of a reference, or records of a teacher."""
        return self._windows.logprobs is not None

    @property
    def kind(self) -> BatchKind:
        return BatchKind.of(self._windows)

    @property
    def num_windows(self) -> int:
        """Return the windows of an epoch."""
        return self._windows.num_windows

    @property
    def num_drawn(self) -> int:
        """Return how many windows have been drawn since the start of the first epoch."""
        return self._epoch * self._windows.num_windows + self._cursor

    @property
    def position(self) -> dict[str, Any]:
        """Return the position of the next batch and a fingerprint of the data, as data for JSON and for `seek`."""
        return {"epoch": self._epoch, "cursor": self._cursor, **dataclasses.asdict(self._windows.corpus.fingerprint)}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises ConfigError for one of other data or outside this data."""
        corpus, num_windows = self._windows.corpus, self._windows.num_windows
        wrong = [key for key in self.position if type(position.get(key)) is not int]
        if wrong or position["epoch"] > MOST_EPOCHS:
            raise ConfigError(f"the saved data position {dict(position)} is damaged: see {(wrong or ['epoch'])[0]}")
        saved = Fingerprint(position["num_tokens"], position["crc32"])
        if saved != corpus.fingerprint:
            raise ConfigError(
                f"the run was saved with other data than {corpus.name} holds now: {saved} then, {corpus.fingerprint} "
                "now; restore the files the run was started with, or start a new run_dir"
            )
        if position["epoch"] < 0 or not 0 <= position["cursor"] < num_windows:
            raise ConfigError(
                f"the saved data position (epoch {position['epoch']}, cursor {position['cursor']}) is outside of the "
                f"{num_windows} windows of an epoch of {corpus.name}; data.seq_len differs, or the save is damaged"
            )
        self._begin(position["epoch"], position["cursor"])

    def next_batch(self) -> Batch:
        rows = self.draw(self._batch_size)
        return assemble(rows, self.kind)

    def draw(self, count: int) -> Rows:
        """Return the next `count` windows."""
        drawn: list[NDArray[np.int64]] = []
        while count:
            part = self._order[self._cursor : self._cursor + count]
            drawn.append(part)
            count -= part.size
            self._cursor += part.size
            if self._cursor == self._windows.num_windows:
                self._begin(self._epoch + 1)
        return self._windows.rows(np.concatenate(drawn))

    def _begin(self, epoch: int, cursor: int = 0) -> None:
        self._epoch, self._cursor = epoch, cursor
        count = self._windows.num_windows
        self._order = permutation(count, self._seed, epoch) if self._shuffle else np.arange(count)

    def skip(self, num_batches: int) -> None:
        """Move the position on by this many batches without making them."""
        self.skip_windows(num_batches * self._batch_size)

    def skip_windows(self, count: int) -> None:
        epoch, cursor = divmod(self.num_drawn + count, self._windows.num_windows)
        if epoch != self._epoch:  # else the order stays, which takes long to compute
            self._begin(epoch)
        self._cursor = cursor


class HeldOut:
    """Divides held-out data into numbered batches: every window of every source once, unshuffled.

    A batch holds windows of one source. The last batch of a source may have fewer rows than the others.
    """

    def __init__(
        self, sources: Sequence[Windows], *, batch_size: int, micro_batch_size: int, starts: Sequence[int] = ()
    ) -> None:
        """Divide the windows of all sources into batches of `batch_size` rows, a multiple of `micro_batch_size`.

        Rows without tokens fill the last micro-batch of a source.

        starts: windows at the start of each source that are left out; empty: none.
        """
        self._sources = sources
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._starts = starts or (0,) * len(sources)
        counts = (source.num_windows - start for source, start in zip(sources, self._starts, strict=True))
        self._ends = list(accumulate(-(-count // batch_size) for count in counts))

    @property
    def num_batches(self) -> int:
        return self._ends[-1]

    @property
    def joins_documents(self) -> bool:
        return any(source.joins_documents for source in self._sources)

    def source_of(self, index: int) -> int:
        return bisect_right(self._ends, index)

    def batch(self, index: int) -> Batch:
        """Return batch `index`, from 0 to num_batches - 1. Its number of rows is a multiple of the micro-batch size."""
        source = self._sources[self.source_of(index)]
        rows = source.rows(np.array(self.rows_of(index)))
        num_pads, seq_len = -len(rows.ids) % self._micro_batch_size, rows.ids.shape[1] - 1
        pads = Rows.of_pads(num_pads, seq_len, rows.logprobs.dtype, rows.columns.shape[2])
        whole = Rows(*(np.concatenate(parts) for parts in zip(*[rows, pads], strict=True)))
        return assemble(whole, BatchKind.of(source))

    def places(self, index: int) -> NDArray[np.int64]:
        """Return the index of each target of a batch among the tokens of its source, [rows, seq_len]; -1 for a pad.

        Rows that fill the last micro-batch are left out.
        """
        source = self._sources[self.source_of(index)]
        return divided(source.places(np.array(self.rows_of(index))), source.row_parts)[:, 1:]

    def rows_of(self, index: int) -> range:
        """Return the windows of a batch among those of its source."""
        number = self.source_of(index)
        before = self._ends[number - 1] if number else 0
        first = self._starts[number] + (index - before) * self._batch_size
        return range(first, min(first + self._batch_size, self._sources[number].num_windows))


def permutation(num_windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of windows in an epoch: window i sorted by splitmix64(i ^ splitmix64_chain(seed, epoch)).

    This uses only integer arithmetic, so a saved position means the same windows with any version of any library.
    """
    key = np.uint64(splitmix64_chain(seed, epoch))
    return np.argsort(splitmix64(np.arange(num_windows, dtype=np.uint64) ^ key), kind="stable")
