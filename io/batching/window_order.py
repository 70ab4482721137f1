"""Determines the order in which a source's windows are drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.splitmix import splitmix64, splitmix64_chain
from megatrain_ray.io.batching.windows import Windows
from megatrain_ray.io.tokens.corpus import Fingerprint


def permutation(num_windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of windows in an epoch: window i sorted by splitmix64(i ^ splitmix64_chain(seed, epoch)).

    This uses only integer arithmetic, so a saved position means the same windows with any version of any library.
    """
    key = np.uint64(splitmix64_chain(seed, epoch))
    return np.argsort(splitmix64(np.arange(num_windows, dtype=np.uint64) ^ key), kind="stable")


class WindowOrder:
    """Yields the indices of windows, epoch after epoch. The state is only (epoch, cursor)."""

    def __init__(self, windows: Windows, *, shuffle: bool, seed: int) -> None:
        self._corpus = windows.corpus
        self._num_windows = windows.num_windows
        self._shuffle = shuffle
        self._seed = seed
        self._begin(epoch=0)

    @property
    def num_drawn(self) -> int:
        """Return how many windows have been drawn since the start of the first epoch."""
        return self._epoch * self._num_windows + self._cursor

    @property
    def position(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "cursor": self._cursor, **dataclasses.asdict(self._corpus.fingerprint)}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises ConfigError for one of other data or outside this data."""
        saved, here = Fingerprint(position["num_tokens"], position["crc32"]), self._corpus.fingerprint
        if saved != here:
            raise ConfigError(
                f"the saved data position belongs to other data: it is of {saved}, data.path holds {here} "
                f"({self._corpus.name}); restore the files the run was started with, or start a new run_dir"
            )
        if position["epoch"] < 0 or not 0 <= position["cursor"] < self._num_windows:
            raise ConfigError(
                f"the saved data position (epoch {position['epoch']}, cursor {position['cursor']}) is outside of the "
                f"{self._num_windows} windows of an epoch of {self._corpus.name}; data.seq_len differs, or the save is "
                "damaged"
            )
        self._begin(position["epoch"], position["cursor"])

    def draw(self, count: int) -> NDArray[np.int64]:
        """Return the indices of the next `count` windows."""
        drawn: list[NDArray[np.int64]] = []
        while count:
            part = self._order[self._cursor : self._cursor + count]
            drawn.append(part)
            count -= part.size
            self._cursor += part.size
            if self._cursor == self._num_windows:
                self._begin(self._epoch + 1)
        return np.concatenate(drawn)

    def skip(self, count: int) -> None:
        """Go on by `count` windows."""
        epoch, cursor = divmod(self.num_drawn + count, self._num_windows)
        if epoch != self._epoch:  # else the order stays, which takes long to compute
            self._begin(epoch)
        self._cursor = cursor

    def _begin(self, epoch: int, cursor: int = 0) -> None:
        self._epoch, self._cursor = epoch, cursor
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        return permutation(self._num_windows, self._seed, epoch) if self._shuffle else np.arange(self._num_windows)
