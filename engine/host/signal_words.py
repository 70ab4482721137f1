"""Owns the words in shared memory by which GPU workers and optimizer shards signal each other.

Update u of a layer takes these steps. The worker stores its gradient in the slab, lands it, and commits the header
(before or after). If the gradient waits on disk, each shard publishes that it has stored its part. Then each shard
marks the layer as begun, writes it, and publishes generation u. With several workers (ranks), the first one decides
where a gradient lies and commits; each stores and lands its own part.

Stores release and loads acquire, so a process that sees a word also sees what was written before it. Doorbells count
changes: a waiter that reads the bell before it tests its condition misses nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from typing import NamedTuple

from megatrain_ray.engine.host.interfaces import EVERY_GENERATION
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.errors import DeadlineError, MegatrainError, ShardFailedError
from megatrain_ray.io.words.atomic_words import Words

NUM_HEADERS = 4  # updates whose headers are kept: shards may lag behind the last committed one by three


class _Word(IntEnum):
    COMMITTED = 0  # the last update whose header is valid
    STOP = 1
    FAILED = 2  # 1 + index of a shard that failed
    LANDED_BELL = 3  # counts commits, landings and stop
    GENERATION_BELL = 4  # counts generations, stored gradients, working copies on disk, places, failures and stop


class _Header(IntEnum):
    UPDATE = 0
    ADAM_STEP = 1
    LR = 2  # bits of a float64, as is SCALE
    SCALE = 3
    SKIP = 4
    SAVE = 5


class TornLayer(NamedTuple):
    """Names a layer whose update was begun and not finished, and that update."""

    layer: int
    update: int


class Placed(IntEnum):
    """Names what waits in the slab for a layer. The value is the index of its first word among the layer's words.

    It has three words: the byte where it begins, the update that was given a place last, and the byte where that place
    begins. The words for what the ranks have landed come after them.
    """

    GRADIENT = 0
    DIRECTIONS = 3


_START, _PLACED, _NEXT = range(3)
_PLACES = 3 * len(Placed)
_FIRST_LAYER = len(_Word) + NUM_HEADERS * len(_Header)
_SHARD_WORDS = 3


class HostWords:
    """Reads and writes the signal words of one host. All words are zero to begin with.

    Per layer: its places in the slab. Per rank and layer: landed. Per shard and layer: begun, generation and stored.
    """

    def __init__(
        self, buffer: memoryview, num_layers: int, num_shards: int, num_ranks: int = 1, first_shard: int = 0
    ) -> None:
        """Use words in `buffer`.

        buffer: shared memory of at least `num_words` 8-byte words, aligned to 8 bytes.
        first_shard: number of the host's first shard in messages.
        """
        self._first_shard = first_shard
        self._words = Words(buffer, self.num_words(num_layers, num_shards, num_ranks))
        self._num_layers = num_layers
        self._num_shards = num_shards
        self._num_ranks = num_ranks

    @staticmethod
    def num_words(num_layers: int, num_shards: int, num_ranks: int = 1) -> int:
        return _FIRST_LAYER + num_layers * (_PLACES + num_ranks + _SHARD_WORDS * num_shards)

    def reset(self, generation: int, updated: Sequence[Collection[int]]) -> None:
        """Give every layer `generation`, with nothing landed after it. Call it before any shard runs.

        updated: the layers that each shard updates. Of all other layers, the shard has every generation.
        """
        for word in range(self.num_words(self._num_layers, self._num_shards, self._num_ranks)):
            self._words.store(word, 0)
        self._words.store(_Word.COMMITTED, generation)
        for layer in range(self._num_layers):
            self._forget_landed(layer, generation)
            for shard, of_shard in enumerate(updated):
                own = generation if layer in of_shard else EVERY_GENERATION
                self._words.store(self._begun(shard, layer), own)
                self._words.store(self._generation(shard, layer), own)
                self._words.store(self._stored(shard, layer), own)

    def commit(self, header: UpdateParams) -> None:
        """Publish the header of the next update.

        Raises MegatrainError if it is not the next one, or if shards lag too far behind.
        """
        oldest = min(self.generation(layer) for layer in range(self._num_layers))
        committed = self._words.load(_Word.COMMITTED)
        if header.update != committed + 1 or oldest < header.update - NUM_HEADERS + 1:
            raise MegatrainError(
                f"update {header.update} cannot be committed: the last one was {committed}, the slowest layer is at "
                f"generation {oldest}, expected at least {header.update - NUM_HEADERS + 1}"
            )
        first = self._header(header.update)
        self._words.store(first + _Header.UPDATE, header.update)
        self._words.store(first + _Header.ADAM_STEP, header.adam_step)
        self._words.store_float(first + _Header.LR, header.lr)
        self._words.store_float(first + _Header.SCALE, header.scale)
        self._words.store(first + _Header.SKIP, int(header.skip))
        self._words.store(first + _Header.SAVE, int(header.save))
        self._words.store(_Word.COMMITTED, header.update)
        self._words.add(_Word.LANDED_BELL, 1)

    def header(self, update: int) -> UpdateParams:
        """Return the header of an update that is committed, and that the caller has not finished.

        Raises MegatrainError for any other update.
        """
        first = self._header(update)
        header = UpdateParams(
            update=self._words.load(first + _Header.UPDATE),
            adam_step=self._words.load(first + _Header.ADAM_STEP),
            lr=self._words.load_float(first + _Header.LR),
            scale=self._words.load_float(first + _Header.SCALE),
            skip=bool(self._words.load(first + _Header.SKIP)),
            save=bool(self._words.load(first + _Header.SAVE)),
        )
        if header.update != update:
            raise MegatrainError(f"the header of update {update} is not there: its place holds update {header.update}")
        return header

    def saved_at(self, generation: int) -> bool:
        """Return whether a save wants this generation.

        The answer is right until every layer of every shard is beyond it.
        """
        first = self._header(generation)
        return self._words.load(first + _Header.UPDATE) == generation and bool(self._words.load(first + _Header.SAVE))

    def place(self, what: Placed, layer: int, update: int, start: int) -> None:
        """Publish at which byte of the slab the gradient or the directions of an update will begin.

        The first rank calls it for the others.
        """
        self._words.store(self._place(what, layer) + _NEXT, start)
        self._words.store(self._place(what, layer) + _PLACED, update)
        self._words.add(_Word.GENERATION_BELL, 1)

    def placed_at(self, what: Placed, layer: int, update: int) -> int | None:
        """Return the byte that `place` published, or None while it has not for this update."""
        if self._words.load(self._place(what, layer) + _PLACED) < update:
            return None
        return self._words.load(self._place(what, layer) + _NEXT)

    def land(self, layer: int, update: int, gradient_start: int, direction_start: int = 0, rank: int = 0) -> None:
        """Publish that this rank's part of the layer's gradient is complete in the slab.

        gradient_start: byte of the slab at which the whole gradient begins.
        direction_start: byte of the slab at which its directions begin, if Muon trains something of the layer.

        Raises MegatrainError while a shard may still read the layer's previous gradient.
        """
        if self.generation(layer) != update - 1:
            raise MegatrainError(
                f"the gradient of layer {layer} landed for update {update}, but the layer is at generation "
                f"{self.generation(layer)}, expected {update - 1}"
            )
        if rank == 0:
            self._words.store(self._place(Placed.GRADIENT, layer) + _START, gradient_start)
            self._words.store(self._place(Placed.DIRECTIONS, layer) + _START, direction_start)
        self._words.store(self._landed(layer, rank), update)
        self._words.add(_Word.LANDED_BELL, 1)

    @property
    def committed(self) -> int:
        """Return the last update whose header is valid."""
        return self._words.load(_Word.COMMITTED)

    def has_landed(self, layer: int, update: int) -> bool:
        """Return whether all ranks have landed the layer's gradient for this update or a later one."""
        return self._last_landed(layer) >= update

    def withdraw(self, update: int) -> None:
        """Discard gradients that landed for the update after `update`.

        Call it once every layer has generation `update`, the last committed one. Nobody has read these gradients, since
        their update is not committed.
        """
        for layer in range(self._num_layers):
            if self.has_landed(layer, update):
                self._forget_landed(layer, update)

    def gradient_start(self, layer: int) -> int:
        """Return the byte offset in the slab of the gradient that landed last."""
        return self._words.load(self._place(Placed.GRADIENT, layer) + _START)

    def direction_start(self, layer: int) -> int:
        """Return the byte offset in the slab of the directions that landed last."""
        return self._words.load(self._place(Placed.DIRECTIONS, layer) + _START)

    def wait_landed(self, layer: int, update: int, timeout_s: float) -> bool:
        """Wait until the update is committed and the layer's gradient has landed.

        Returns False after `timeout_s` or on stop.
        """

        def landed() -> bool:
            committed = self._words.load(_Word.COMMITTED)
            return self.stopped or min(committed, self._last_landed(layer)) >= update

        return self._wait(_Word.LANDED_BELL, landed, timeout_s) and not self.stopped

    def wait_gradient(self, layer: int, update: int, timeout_s: float) -> bool:
        """Wait until the layer's gradient has landed, whether its update is committed or not.

        Returns False after `timeout_s` or on stop.
        """

        def landed() -> bool:
            return self.stopped or self._last_landed(layer) >= update

        return self._wait(_Word.LANDED_BELL, landed, timeout_s) and not self.stopped

    def store_gradient(self, shard: int, layer: int, update: int) -> None:
        """Publish that the shard has its part of the layer's gradient outside the slab."""
        self._words.store(self._stored(shard, layer), update)
        self._words.add(_Word.GENERATION_BELL, 1)

    def ring(self) -> None:
        """Ring the generation bell for another reason: a working copy has been written to disk."""
        self._words.add(_Word.GENERATION_BELL, 1)

    def shard_stored(self, shard: int, layer: int) -> int:
        """Return the last update for which the shard has stored the layer's gradient."""
        return self._words.load(self._stored(shard, layer))

    def stored(self, layer: int) -> int:
        """Return the last update for which every shard has stored the layer's gradient."""
        return min(self.shard_stored(shard, layer) for shard in range(self._num_shards))

    def begin(self, shard: int, layer: int, update: int) -> None:
        """Mark the layer as begun, before the first write.

        A layer whose begun word is larger than its generation is torn.
        """
        self._words.store(self._begun(shard, layer), update)

    def torn(self, shard: int) -> TornLayer | None:
        """Return what a shard that died has begun and not finished, or None.

        It is one layer at most, since a shard works on one at a time.
        """
        for layer in range(self._num_layers):
            begun = self._words.load(self._begun(shard, layer))
            if begun > self.shard_generation(shard, layer):
                return TornLayer(layer, begun)
        return None

    def shard_generation(self, shard: int, layer: int) -> int:
        """Return the generation of the shard's own part of the layer."""
        return self._words.load(self._generation(shard, layer))

    def finish(self, shard: int, layer: int, update: int) -> None:
        """Publish, after the last write, that the shard's part of the layer has generation `update`."""
        self._words.store(self._generation(shard, layer), update)
        self._words.add(_Word.GENERATION_BELL, 1)

    def generation(self, layer: int) -> int:
        """Return the generation that every shard's part of the layer has reached."""
        return min(self.shard_generation(shard, layer) for shard in range(self._num_shards))

    def wait_shard_generation(self, shard: int, layer: int, generation: int, timeout_s: float) -> None:
        """Wait until the shard's own part of the layer has this generation.

        Raises DeadlineError after `timeout_s`, MegatrainError if a shard failed or the shards were stopped.
        """

        def reached() -> bool:
            if self.shard_generation(shard, layer) >= generation:
                return True
            self.check()
            return False

        if not self._wait(_Word.GENERATION_BELL, reached, timeout_s):
            raise self.late(layer, generation, timeout_s)

    def late(self, layer: int, generation: int, timeout_s: float) -> DeadlineError:
        """Return an error that says what keeps the layer from this generation."""
        behind = [s for s in range(self._num_shards) if self.shard_generation(s, layer) < generation]
        landed, committed = self._last_landed(layer), self._words.load(_Word.COMMITTED)
        cause = f"optimizer shard {', '.join(str(self.number_of(shard)) for shard in behind)} is stuck"
        if min(landed, committed) < generation:
            cause = f"its gradient is that of update {landed}, the last committed update is {committed}"
        return DeadlineError(f"layer {layer} did not get generation {generation} within {timeout_s:.0f} s: {cause}")

    def check(self) -> None:
        """Raise MegatrainError if a shard failed or the shards were stopped."""
        failed = self._words.load(_Word.FAILED)
        if failed:
            raise ShardFailedError(f"optimizer shard {self.number_of(failed - 1)} failed; its own error says why")
        if self.stopped:
            raise MegatrainError("the optimizer shards were stopped")

    def number_of(self, shard: int) -> int:
        """Return the number by which messages call the shard."""
        return self._first_shard + shard

    def generation_bell(self) -> int:
        """Return the bell, which grows with every generation, stored gradient, placement, `ring`, failure and stop.

        Read it before testing a condition, then wait until it has grown.
        """
        return self._words.load(_Word.GENERATION_BELL)

    def wait_generation_bell(self, seen: int, timeout_s: float) -> int:
        """Wait at most `timeout_s` until the bell is larger than `seen`, and return it."""
        return self._wait_bell(_Word.GENERATION_BELL, seen, timeout_s)

    def stop(self) -> None:
        """Tell the shards to end before their next layer."""
        self._words.store(_Word.STOP, 1)
        self._words.add(_Word.LANDED_BELL, 1)
        self._words.add(_Word.GENERATION_BELL, 1)

    @property
    def stopped(self) -> bool:
        return self._words.load(_Word.STOP) != 0

    def fail(self, shard: int) -> None:
        """Publish that the shard will finish nothing more."""
        self._words.store(_Word.FAILED, shard + 1)
        self._words.add(_Word.GENERATION_BELL, 1)

    def _wait(self, bell: _Word, ready: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while True:
            seen = self._words.load(bell)
            if ready():
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._wait_bell(bell, seen, left_s)

    def _wait_bell(self, bell: _Word, seen: int, timeout_s: float) -> int:
        with contextlib.suppress(DeadlineError):
            return self._words.wait_at_least(bell, seen + 1, timeout_s)
        return self._words.load(bell)

    def _header(self, update: int) -> int:
        return len(_Word) + update % NUM_HEADERS * len(_Header)

    def _place(self, what: Placed, layer: int) -> int:
        return self._places(layer) + what

    def _places(self, layer: int) -> int:
        return _FIRST_LAYER + (_PLACES + self._num_ranks) * layer

    def _landed(self, layer: int, rank: int) -> int:
        return self._places(layer) + _PLACES + rank

    def _last_landed(self, layer: int) -> int:
        """Return the last update for which all ranks have landed their parts."""
        return min(self._words.load(self._landed(layer, rank)) for rank in range(self._num_ranks))

    def _forget_landed(self, layer: int, update: int) -> None:
        """Record `update` as the last one for which the layer's gradient has landed or been given a place."""
        for what in Placed:
            self._words.store(self._place(what, layer) + _PLACED, update)
        for rank in range(self._num_ranks):
            self._words.store(self._landed(layer, rank), update)

    def _begun(self, shard: int, layer: int) -> int:
        of_layers = (_PLACES + self._num_ranks) * self._num_layers
        return _FIRST_LAYER + of_layers + _SHARD_WORDS * (self._num_layers * shard + layer)

    def _generation(self, shard: int, layer: int) -> int:
        return self._begun(shard, layer) + 1

    def _stored(self, shard: int, layer: int) -> int:
        return self._begun(shard, layer) + 2
