"""Draws the windows of a source that is read in portions, of which a few are on disk at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.batching.batch import Batch, BatchKind, assemble
from megatrain_ray.io.batching.batch_stream import MOST_EPOCHS, BatchStream, permutation
from megatrain_ray.io.batching.splitmix import splitmix64_chain
from megatrain_ray.io.batching.windows import PackedWindows, Rows, SpanWindows, Windows
from megatrain_ray.io.tokens.token_files import Fingerprint

NUM_UPCOMING = 2  # portions to have on disk: that which is drawn from, and the one after it


class PortionFacts(NamedTuple):
    """Describes a portion that was made, whether or not it is on disk still.

    fingerprint: of its tokens.
    source_bytes, token_bytes: size of its files, and of its folder of tokens.
    """

    num_windows: int
    fingerprint: Fingerprint
    source_bytes: int
    token_bytes: int


class Portions(Protocol):
    """Holds the portions of a source."""

    @property
    def name(self) -> str:
        """Return what messages call the source."""

    @property
    def num_portions(self) -> int: ...

    @property
    def listing(self) -> Mapping[str, Any]:
        """Return what tells the files of the source apart from others, as data for JSON."""

    @property
    def joins_documents(self) -> bool:
        """Return whether a row may hold several documents."""

    @property
    def weighted(self) -> bool:
        """Return whether batches have loss weights."""

    def facts(self, number: int) -> PortionFacts | None:
        """Return what is known of a portion; None if it was never made."""

    def is_there(self, number: int) -> bool:
        """Return whether a portion is on disk."""

    def open(self, number: int) -> Windows:
        """Open the windows of a portion that is on disk. Raises ConfigError if it is not."""


class PortionStream:
    """Draws the windows of one source portion after portion. They depend only on the data, the seed and the position.

    With `shuffle` each epoch has its own order of portions, and of the windows in each. A batch may span portions. The
    state is (epoch, index of the portion in the epoch's order, cursor in the portion).
    """

    referenced = False  # whether batches have log-probabilities of a reference

    def __init__(self, portions: Portions, *, batch_size: int, shuffle: bool, seed: int) -> None:
        self.portions = portions
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self.num_drawn = 0  # windows since the start of the first epoch
        self._opened: tuple[int, Windows] | None = None  # number of a portion, and its windows
        self._order = lru_cache(maxsize=4)(_order)  # of portions and of windows in one, in two epochs
        self._go_to(0, 0)

    @property
    def joins_documents(self) -> bool:
        return self.portions.joins_documents

    @property
    def weighted(self) -> bool:
        return self.portions.weighted

    @property
    def kind(self) -> BatchKind:
        """Return what batches have: of single tokens, without further columns."""
        return BatchKind(weighted=self.weighted)

    @property
    def position(self) -> dict[str, Any]:
        """Return the position of the next batch, as data for JSON and for `seek`.

        It has the fingerprint of the portion unless nothing was drawn from that, and what tells the files apart.
        """
        facts = self.portions.facts(self._number) if self._cursor else None
        return {
            "epoch": self._epoch, "portion": self._index, "cursor": self._cursor, "num_drawn": self.num_drawn,
            **(dataclasses.asdict(facts.fingerprint) if facts else {}), "files": dict(self.portions.listing),
        }  # fmt: skip

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises ConfigError for one of other data or outside this data.

        The tokens of the portion are compared with those at that time if the portion has been made.
        """
        self._check_files(position.get("files"))
        state = [position.get(key) for key in ("epoch", "portion", "cursor", "num_drawn")]
        numbers = [number for number in state if type(number) is int and 0 <= number <= MOST_EPOCHS]
        if len(numbers) < len(state) or numbers[1] >= self.portions.num_portions:
            raise ConfigError(f"the saved data position {dict(position)} of {self.portions.name} is damaged")
        self._go_to(*numbers[:3])
        self.num_drawn = numbers[3]
        if self._cursor and (facts := self.portions.facts(self._number)) is not None:
            self._check_portion(position, facts)

    def _check_files(self, saved: Any) -> None:
        here = self.portions.listing
        if saved != here:
            then, now = (
                ", ".join(f"{key} {value}" for key, value in files.items()) if isinstance(files, Mapping) else "none"
                for files in (saved, here)
            )
            raise ConfigError(
                f"the run was saved with other files than {self.portions.name} has now: {then} then; {now} now; "
                "restore the files the run was started with, and their times of change, or start a new run_dir"
            )

    def _check_portion(self, position: Mapping[str, Any], facts: PortionFacts) -> None:
        saved = Fingerprint(position.get("num_tokens", 0), position.get("crc32", 0))
        where = f"portion {self._number + 1} of {self.portions.name}"
        if saved != facts.fingerprint:
            raise ConfigError(
                f"the run was saved with other data than {where} holds now: {saved} then, {facts.fingerprint} now; "
                "restore the files the run was started with, or start a new run_dir"
            )
        if self._cursor >= facts.num_windows:
            raise ConfigError(
                f"the saved data position (window {self._cursor}) is outside of the {facts.num_windows} windows of "
                f"{where}; data.seq_len differs, or the save is damaged"
            )

    def upcoming(self) -> list[int]:
        """Return the portions to have on disk, in the order of need: the current one and the next one.

        Those without windows are left out. A portion that was never made comes last, since it may have none.
        """
        found: list[int] = []
        for after in range(self.portions.num_portions + NUM_UPCOMING):
            number = self._number_of(self._index + after)
            facts = self.portions.facts(number)
            if facts is None or facts.num_windows:
                found.append(number)
            if facts is None or len(found) == NUM_UPCOMING:
                return found
        raise ConfigError(f"data.path: nothing to learn in {self.portions.name}: no portion has a window of 2 tokens")

    @property
    def num_ready(self) -> int:
        """Return how many windows can be drawn from the portions that are on disk."""
        ready = -self._cursor
        for number in self.upcoming():
            facts = self.portions.facts(number)
            if facts is None or not self.portions.is_there(number):
                break
            ready += facts.num_windows
        return max(0, ready)

    def steps_ready(self, most: int) -> int:
        """Return how many batches, up to `most`, can be drawn from the portions that are on disk."""
        return min(most, self.num_ready // self._batch_size)

    def next_batch(self) -> Batch:
        return assemble(self.draw(self._batch_size), self.kind)

    def draw(self, count: int) -> Rows:
        """Return the next `count` windows, of which there are no more than `num_ready`."""
        drawn = []
        for number, epoch, places in self._advance(count):
            indices = self._order_in(number, epoch)[places.start : places.stop]
            drawn.append(self._windows(number).rows(indices))
        if self._opened and self._opened[0] != self._number:
            self._opened = None  # closes the files: else they would take space after they are deleted
        return Rows(*(np.concatenate(parts) for parts in zip(*drawn, strict=True)))

    def skip(self, num_batches: int) -> None:
        """Move the position on by this many batches without making them. Raises MegatrainError as skip_windows."""
        self.skip_windows(num_batches * self._batch_size)

    def skip_windows(self, count: int) -> None:
        """Move the position on. Raises MegatrainError if a portion on the way was never made."""
        for _ in self._advance(count):
            pass

    def _advance(self, count: int) -> Iterator[tuple[int, int, range]]:
        """Move the position on by `count` windows. Yield portion, epoch, and places in its order of each stretch."""
        while count:
            number, epoch = self._number, self._epoch
            facts = self.portions.facts(number)
            if facts is None:
                raise MegatrainError(
                    f"portion {number + 1} of {self.portions.name} is not known, although its windows were drawn: were "
                    "files of run_dir/stream deleted? The same command resumes from the last save"
                )
            places = range(self._cursor, min(self._cursor + count, facts.num_windows))
            count -= len(places)
            self.num_drawn += len(places)
            self._cursor += len(places)
            if self._cursor == facts.num_windows:
                self._go_to(
                    *divmod(self._epoch * self.portions.num_portions + self._index + 1, self.portions.num_portions)
                )
            if places:
                yield number, epoch, places

    def _go_to(self, epoch: int, index: int, cursor: int = 0) -> None:
        self._epoch, self._index, self._cursor = epoch, index, cursor

    @property
    def _number(self) -> int:
        return self._number_of(self._index)

    def _number_of(self, index: int) -> int:
        """Return the portion at an index of the current epoch's order; those from num_portions on are of later ones."""
        epochs, index = divmod(index, self.portions.num_portions)
        return int(self._order_of(self._epoch + epochs)[index])

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        return self._order(self.portions.num_portions, self._seed, epoch, self._shuffle)

    def _order_in(self, number: int, epoch: int) -> NDArray[np.int64]:
        facts = self.portions.facts(number)
        assert facts is not None  # else there is nothing to draw
        return self._order(facts.num_windows, splitmix64_chain(self._seed, number), epoch, self._shuffle)

    def _windows(self, number: int) -> Windows:
        if self._opened is None or self._opened[0] != number:
            self._opened = number, self.portions.open(number)
        return self._opened[1]


def _order(count: int, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    return permutation(count, seed, epoch) if shuffle else np.arange(count)


def stream_of(source: Windows | Portions, *, batch_size: int, shuffle: bool, seed: int) -> BatchStream | PortionStream:
    """Open the stream of a source that is tokenised whole, or in portions."""
    if isinstance(source, SpanWindows | PackedWindows):
        return BatchStream(source, batch_size=batch_size, shuffle=shuffle, seed=seed)
    return PortionStream(source, batch_size=batch_size, shuffle=shuffle, seed=seed)
