"""Owns the words in shared memory by which GPU workers and optimizer shards signal each other.

shared_update_state.py reads and writes them. Update u of a layer takes these steps. The worker stores its gradient in
the slab, lands it, and commits the update's parameters, before or after. If the gradient waits on disk, each shard
publishes that it has stored its part. Then each shard marks the layer as begun, writes it, and publishes generation u.
With several workers (ranks), the first one decides where a gradient lies and commits; each stores and lands its own
part.

Stores release and loads acquire, so a process that sees a word also sees what was written before it. Doorbells count
changes: a waiter that reads the bell before it tests its condition misses nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from enum import IntEnum

from megatrain_ray.errors import DeadlineError, MegatrainError, ShardFailedError
from megatrain_ray.io.words.atomic_words import Words

NUM_LOGGED = 4  # updates whose parameters are kept: shards may lag behind the last committed one by three
UPDATE_WORDS = 6  # of UpdateParams


class Word(IntEnum):
    """Names the words that exist once for a host."""

    COMMITTED = 0  # the last update whose parameters are valid
    STOP = 1
    FAILED = 2  # 1 + index of a shard that failed
    LANDED_BELL = 3  # counts commits, landings and stop
    GENERATION_BELL = 4  # counts generations, stored gradients, working copies on disk, places, failures and stop


class SlabRegion(IntEnum):
    """Names what waits in the slab for a layer. The value is the index of its first word among the layer's words."""

    GRADIENT = 0
    DIRECTIONS = 3


class PlaceWord(IntEnum):
    """Names the words about what waits in the slab for a layer."""

    START = 0  # the byte where it begins
    UPDATE = 1  # the update that was given a place last
    NEXT_START = 2  # the byte where that place begins


class ShardWord(IntEnum):
    """Names the words of a shard about a layer: the last update that it has begun, finished, stored the gradient of."""

    BEGUN = 0
    GENERATION = 1
    STORED = 2


_FIRST_LAYER = len(Word) + NUM_LOGGED * UPDATE_WORDS


class SignalWords:
    """Locates the words of one host, and waits for its bells. All words are zero to begin with.

    Per layer: two places in the slab, then landed for each rank. Per shard and layer: begun, generation and stored.
    """

    def __init__(
        self, buffer: memoryview, num_layers: int, num_shards: int, num_ranks: int = 1, first_shard: int = 0
    ) -> None:
        """Use words in `buffer`.

        buffer: shared memory of at least `num_words` 8-byte words, aligned to 8 bytes.
        first_shard: number of the host's first shard in messages.
        """
        self.num_layers, self.num_shards, self.num_ranks = num_layers, num_shards, num_ranks
        self._first_shard = first_shard
        self._words_of_layer = len(SlabRegion) * len(PlaceWord) + num_ranks
        words = Words(buffer, self.num_words(num_layers, num_shards, num_ranks))
        self.load, self.store = words.load, words.store
        self._words = words

    @staticmethod
    def num_words(num_layers: int, num_shards: int, num_ranks: int = 1) -> int:
        of_layer = len(SlabRegion) * len(PlaceWord) + num_ranks + len(ShardWord) * num_shards
        return _FIRST_LAYER + num_layers * of_layer

    def logged(self, update: int) -> range:
        """Return the words for the parameters of an update."""
        first = len(Word) + update % NUM_LOGGED * UPDATE_WORDS
        return range(first, first + UPDATE_WORDS)

    def place(self, what: SlabRegion, layer: int, word: PlaceWord) -> int:
        return _FIRST_LAYER + self._words_of_layer * layer + what + word

    def landed(self, layer: int, rank: int) -> int:
        """Return the word for the last update for which the rank has landed its part of the layer's gradient."""
        return _FIRST_LAYER + self._words_of_layer * layer + len(SlabRegion) * len(PlaceWord) + rank

    def of_shard(self, shard: int, layer: int, word: ShardWord) -> int:
        first = _FIRST_LAYER + self._words_of_layer * self.num_layers
        return first + len(ShardWord) * (self.num_layers * shard + layer) + word

    def last_landed(self, layer: int) -> int:
        """Return the last update for which all ranks have landed their parts."""
        return min(self.load(self.landed(layer, rank)) for rank in range(self.num_ranks))

    def number_of(self, shard: int) -> int:
        """Return the number by which messages call the shard."""
        return self._first_shard + shard

    def check(self) -> None:
        if failed := self.load(Word.FAILED):
            raise ShardFailedError(f"optimizer shard {self.number_of(failed - 1)} failed; its own error says why")
        if self.stopped:
            raise MegatrainError("the optimizer shards were stopped")

    def stop(self) -> None:
        """Tell the shards to end before their next layer."""
        self.store(Word.STOP, 1)
        self.ring(Word.LANDED_BELL)
        self.ring()

    @property
    def stopped(self) -> bool:
        return self.load(Word.STOP) != 0

    def fail(self, shard: int) -> None:
        """Publish that the shard will finish nothing more."""
        self.store(Word.FAILED, shard + 1)
        self.ring()

    def ring(self, bell: Word = Word.GENERATION_BELL) -> None:
        """Make everybody who waits for the bell test its condition again."""
        self._words.add(bell, 1)

    def generation_bell(self) -> int:
        """Return the bell's count. Read it before testing a condition, then wait until it has grown."""
        return self.load(Word.GENERATION_BELL)

    def wait_generation_bell(self, seen: int, timeout_s: float) -> int:
        """Wait at most `timeout_s` until the bell is larger than `seen`, and return it."""
        return self._wait_bell(Word.GENERATION_BELL, seen, timeout_s)

    def wait(self, bell: Word, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `ready` returns true, testing it whenever the bell rings. Return False after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            seen = self.load(bell)
            if ready():
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._wait_bell(bell, seen, left_s)

    def _wait_bell(self, bell: Word, seen: int, timeout_s: float) -> int:
        with contextlib.suppress(DeadlineError):
            return self._words.wait_at_least(bell, seen + 1, timeout_s)
        return self.load(bell)
