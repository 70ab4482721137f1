"""BatchStream: endless batches of windows in a shuffled order, with an exact position to save and to come back to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.splitmix import splitmix64, splitmix64_chain
from megatrain_ray.io.windows import Fingerprint, TokenWindows

IGNORED = -100  # a target that is not supervised
PAD = 0  # any id would do: nothing supervised attends to a pad


@dataclass(frozen=True, eq=False)
class Batch:
    """The sequences of one update. A target is the token after its input, or -100 where there is none."""

    input_ids: torch.Tensor  # int64 [batch, seq_len]
    targets: torch.Tensor  # int64 [batch, seq_len]
    num_supervised: int  # targets that count
    num_tokens: int  # inputs that are no pads


def permutation(num_windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of windows in an epoch: window i sorted by splitmix64(i ^ splitmix64_chain(seed, epoch)).

    Integer arithmetic only, so a saved position means the same windows with any version of any library.
    """
    key = np.uint64(splitmix64_chain(seed, epoch))
    return np.argsort(splitmix64(np.arange(num_windows, dtype=np.uint64) ^ key), kind="stable")


class BatchStream:
    """Draws windows epoch after epoch; a batch may span epochs. The state is (epoch, cursor) and nothing else."""

    def __init__(self, windows: TokenWindows, *, batch_size: int, shuffle: bool, seed: int) -> None:
        self._windows = windows
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._begin(epoch=0)

    @property
    def num_windows(self) -> int:
        return self._windows.num_windows

    @property
    def num_tokens(self) -> int:
        return self._windows.num_tokens

    @property
    def position(self) -> dict[str, int]:
        """Where the next batch starts, and of which data: for JSON, and for `seek`."""
        return {"epoch": self._epoch, "cursor": self._cursor, **dataclasses.asdict(self._windows.fingerprint)}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Goes to a position. Raises ConfigError for one of other data or outside this data."""
        saved = Fingerprint(position["num_tokens"], position["crc32"])
        here = self._windows.fingerprint
        if saved != here:
            raise ConfigError(
                f"the saved data position belongs to other data: it is of {saved}, data.path holds {here}; restore "
                "the files the run was started with, or start a new run_dir"
            )
        if position["epoch"] < 0 or not 0 <= position["cursor"] < self.num_windows:
            raise ConfigError(
                f"the saved data position (epoch {position['epoch']}, cursor {position['cursor']}) is outside of the "
                f"{self.num_windows} windows of an epoch; data.seq_len differs, or the save is damaged"
            )
        self._begin(position["epoch"], position["cursor"])

    def next_batch(self) -> Batch:
        """The next `batch_size` windows."""
        return assemble(self._windows, np.concatenate(self._draw(self._batch_size)))

    def _draw(self, count: int) -> list[NDArray[np.int64]]:
        drawn = []
        while count:
            part = self._order[self._cursor : self._cursor + count]
            drawn.append(part)
            count -= part.size
            self._cursor += part.size
            if self._cursor == self.num_windows:
                self._begin(self._epoch + 1)
        return drawn

    def _begin(self, epoch: int, cursor: int = 0) -> None:
        self._epoch, self._cursor = epoch, cursor
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        return permutation(self.num_windows, self._seed, epoch) if self._shuffle else np.arange(self.num_windows)


def assemble(windows: TokenWindows, indices: NDArray[np.int64]) -> Batch:
    """The windows of these indices as one batch, short ones padded."""
    columns = np.arange(windows.seq_len + 1)
    real = columns < windows.lengths[indices, None]
    ids = windows.tokens[np.minimum(windows.starts[indices, None] + columns, windows.num_tokens - 1)].astype(np.int64)
    input_ids = np.where(real, ids, PAD)[:, :-1]
    targets = np.where(real, ids, IGNORED)[:, 1:]
    return Batch(
        input_ids=torch.from_numpy(np.ascontiguousarray(input_ids)),
        targets=torch.from_numpy(np.ascontiguousarray(targets)),
        num_supervised=int(real[:, 1:].sum()),
        num_tokens=int(real[:, :-1].sum()),
    )
