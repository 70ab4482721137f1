"""Draws the windows of a source that is read in portions, of which a few are on disk at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import count as count_from
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.batching.batch import Batch, BatchKind, assemble
from megatrain_ray.io.batching.batch_stream import MOST_EPOCHS, BatchStream, permutation
from megatrain_ray.io.batching.corpus import Fingerprint
from megatrain_ray.io.batching.splitmix import splitmix64_chain
from megatrain_ray.io.batching.windows import PackedWindows, Rows, SpanWindows, Windows

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
    state is the place of a portion and the cursor in it. The place counts the portions of all epochs in their order.
    """

    referenced = False  # whether batches have log-probabilities of a reference

    def __init__(self, portions: Portions, *, batch_size: int, shuffle: bool, seed: int) -> None:
        self.portions = portions
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self.num_drawn = 0  # windows since the start of the first epoch
        self._opened: tuple[int, Windows] | None = None  # place of a portion, and its windows
        self._held: dict[int, tuple[int, Rows]] = {}  # by place: cursor of the first row, and rows
        self._order = lru_cache(maxsize=4)(_order)  # of portions and of windows in one, in two epochs
        self._place, self._cursor = 0, 0

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
        facts = self._facts_at(self._place) if self._cursor else None
        epoch, index = divmod(self._place, self.portions.num_portions)
        return {
            "epoch": epoch, "portion": index, "cursor": self._cursor, "num_drawn": self.num_drawn,
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
        epoch, index, self._cursor, self.num_drawn = numbers
        self._place = epoch * self.portions.num_portions + index
        self._held = {}
        if self._cursor and (facts := self._facts_at(self._place)) is not None:
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
        where = f"portion {self._number_at(self._place) + 1} of {self.portions.name}"
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
        """Return the portions to have on disk, in the order of need: the next two whose windows are not in memory.

        Those without windows are left out. A portion that was never made comes last, since it may have none.
        """
        return [self._number_at(place) for place in islice(self._places_to_read(), NUM_UPCOMING)]

    def _places_to_read(self) -> Iterator[int]:
        return (place for place in self._places() if place not in self._held)

    def _places(self) -> Iterator[int]:
        """Yield the places of portions with windows, from the current one on, and at last one that was never made."""
        num_empty = 0  # in a row
        for place in count_from(self._place):
            facts = self._facts_at(place)
            if facts is None or facts.num_windows:
                yield place
            if facts is None:
                return
            num_empty = 0 if facts.num_windows else num_empty + 1
            if num_empty == 2 * self.portions.num_portions:  # in two epochs' orders there are fewer, if one has any
                raise ConfigError(
                    f"data.path: nothing to learn in {self.portions.name}: no portion has a window of 2 tokens"
                )

    @property
    def num_ready(self) -> int:
        """Return how many windows can be drawn from memory and from the upcoming portions that are on disk."""
        ready, num_read = -self._cursor, 0
        for place in self._places():
            if place not in self._held:
                if num_read == NUM_UPCOMING or not self._can_read(place):
                    break
                num_read += 1
            facts = self._facts_at(place)
            assert facts is not None  # it is in memory or on disk
            ready += facts.num_windows
        return max(0, ready)

    def hold_few(self) -> None:
        """Read windows into memory while fewer than a batch can be drawn, as far as they are on disk.

        Then their portions need no room while the next one is made. A batch may span more portions than are on disk.
        """
        while self.num_ready < self._batch_size:
            place = next(self._places_to_read())
            if not self._can_read(place):
                return
            first = self._cursor if place == self._place else 0
            self._held[place] = first, self.portions.open(self._number_at(place)).rows(self._order_at(place)[first:])
            self._opened = None  # of a portion that may be deleted now

    def steps_ready(self, most: int) -> int:
        """Return how many batches, up to `most`, can be drawn from the portions that are on disk."""
        return min(most, self.num_ready // self._batch_size)

    def next_batch(self) -> Batch:
        return assemble(self.draw(self._batch_size), self.kind)

    def draw(self, count: int) -> Rows:
        """Return the next `count` windows, of which there are no more than `num_ready`."""
        drawn = []
        for place, cursors in self._advance(count):
            if place in self._held:
                first, rows = self._held[place]
                drawn.append(Rows._make(part[cursors.start - first : cursors.stop - first] for part in rows))
            else:
                drawn.append(self._windows(place).rows(self._order_at(place)[cursors.start : cursors.stop]))
        self._held = {place: held for place, held in self._held.items() if place >= self._place}
        if self._opened and self._opened[0] != self._place:
            self._opened = None  # closes the files: else they would take space after they are deleted
        return Rows(*(np.concatenate(parts) for parts in zip(*drawn, strict=True)))

    def skip(self, num_batches: int) -> None:
        """Move the position on by this many batches without making them. Raises MegatrainError as skip_windows."""
        self.skip_windows(num_batches * self._batch_size)

    def skip_windows(self, count: int) -> None:
        """Move the position on. Raises MegatrainError if a portion on the way was never made."""
        for _ in self._advance(count):
            pass

    def _advance(self, count: int) -> Iterator[tuple[int, range]]:
        """Move the position on by `count` windows. Yield the place of each portion, and the cursors passed in it."""
        while count:
            place, facts = self._place, self._facts_at(self._place)
            if facts is None:
                raise MegatrainError(
                    f"portion {self._number_at(place) + 1} of {self.portions.name} is not known, although its windows "
                    "were drawn: were files of run_dir/stream deleted? The same command resumes from the last save"
                )
            cursors = range(self._cursor, min(self._cursor + count, facts.num_windows))
            count -= len(cursors)
            self.num_drawn += len(cursors)
            self._cursor += len(cursors)
            if self._cursor == facts.num_windows:
                self._place, self._cursor = place + 1, 0
            if cursors:
                yield place, cursors

    def _number_at(self, place: int) -> int:
        epoch, index = divmod(place, self.portions.num_portions)
        return int(self._order(self.portions.num_portions, self._seed, epoch, self._shuffle)[index])

    def _facts_at(self, place: int) -> PortionFacts | None:
        return self.portions.facts(self._number_at(place))

    def _can_read(self, place: int) -> bool:
        return self._facts_at(place) is not None and self.portions.is_there(self._number_at(place))

    def _order_at(self, place: int) -> NDArray[np.int64]:
        """Return the order of a portion's windows."""
        number, facts = self._number_at(place), self._facts_at(place)
        assert facts is not None  # else there is nothing to draw
        epoch = place // self.portions.num_portions
        return self._order(facts.num_windows, splitmix64_chain(self._seed, number), epoch, self._shuffle)

    def _windows(self, place: int) -> Windows:
        if self._opened is None or self._opened[0] != place:
            self._opened = place, self.portions.open(self._number_at(place))
        return self._opened[1]


def _order(count: int, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    return permutation(count, seed, epoch) if shuffle else np.arange(count)


def stream_of(source: Windows | Portions, *, batch_size: int, shuffle: bool, seed: int) -> BatchStream | PortionStream:
    """Open the stream of a source that is tokenised whole, or in portions."""
    if isinstance(source, SpanWindows | PackedWindows):
        return BatchStream(source, batch_size=batch_size, shuffle=shuffle, seed=seed)
    return PortionStream(source, batch_size=batch_size, shuffle=shuffle, seed=seed)
