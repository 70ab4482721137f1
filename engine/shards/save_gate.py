"""SaveGate: keeps a shard's layers at the generation that a save wants until they are written, or copied aside.

A save is one generation of the whole model, and training goes on meanwhile: a layer is written after its update n and
before its update n + 1. An update that comes before its layer was written copies the layer's part into spare RAM, and
waits for the disk only where there is none left. Layers are written in parts, so that one can be copied even while it
is written: the writer goes on with the copy.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from megatrain_ray.engine.device.deadlines import STEP_DEADLINE_S
from megatrain_ray.engine.host.signal_words import HostWords
from megatrain_ray.engine.shards.shard_state import ShardState
from megatrain_ray.engine.shards.spare_memory import SpareMemory
from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.saves.save_writer import STORED_BYTES, Piece
from megatrain_ray.spans import Row

WATCH_S = 1.0  # an update that waits looks at the stop word at least this often


class LayerState(Enum):
    """Of a layer's part in a save."""

    WAITING = "in the state, which must not change"
    COPYING = "being copied aside"
    COPIED = "in a copy, or parts of it written; the state may change"
    READING = "parts are written, from the state, which must not change"
    WRITTEN = "in the blobs; the state may change"


SETTLED = (LayerState.COPIED, LayerState.WRITTEN)


class _Copy(NamedTuple):
    parts: list[Piece]
    memory: Tensor


class SaveAttempt(NamedTuple):
    """The save of a step; `number` grows with every attempt of the run, since one that failed is made again."""

    step: int
    number: int


NO_ATTEMPT = SaveAttempt(-1, -1)
EVERY_ATTEMPT = SaveAttempt(sys.maxsize, sys.maxsize)


@dataclass
class GatedSave:
    """A shard's part of one save. `stall_s`: seconds that updates were held up. `wanted`: the layer one waits for."""

    attempt: SaveAttempt
    states: dict[int, LayerState]
    copies: dict[int, _Copy] = field(default_factory=dict)
    in_hand: Counter[int] = field(default_factory=Counter)  # parts of a layer that are being read
    to_come: Counter[int] = field(default_factory=Counter)  # parts of a layer that nobody has read yet
    stall_s: float = 0.0
    wanted: int | None = None
    abandoned: bool = False


class SaveGate:
    """One save at a time: one thread begins it, reads `pieces` and calls `done`; another calls `enter` before updates.

    What is still read for an abandoned save may be overwritten meanwhile: it is thrown away.
    """

    def __init__(
        self,
        shard: ShardState,
        words: HostWords,
        index: int,
        order: Sequence[int],
        spare: SpareMemory,
        timeout_s: float,
    ) -> None:
        """`index`: of the shard's words. `order`: in which updates visit layers; those that none visits are written
        while nothing else is ready. `spare`: RAM for copies. `timeout_s`: of any wait."""
        self._shard = shard
        self._words = words
        self._index = index
        self._order = (*shard.layout.model.fixed, *order)
        self._spare = spare
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._layers = {flat.name: i for i, flat in enumerate(shard.layout.model.layers)}
        self._save = GatedSave(NO_ATTEMPT, {}, abandoned=True)
        self._abandoned = NO_ATTEMPT  # the newest of which that is known

    def begin(self, attempt: SaveAttempt) -> GatedSave:
        """A save of the generation that is its step begins; the one before has ended or is abandoned.

        Raises MegatrainError when it was abandoned already: calls may overtake each other.
        """
        with self._changed:
            if attempt.number <= self._abandoned.number:
                raise _abandoned(attempt)
            self._leave(self._save)
            states = {i: LayerState.WAITING if self._shard.copy_bytes(i) else LayerState.WRITTEN for i in self._order}
            self._save = GatedSave(attempt, states)
            self._changed.notify_all()
            return self._save

    def abandon(self, attempt: SaveAttempt) -> None:
        """Attempts up to this one will not be finished: no update waits for them, and their writers fail."""
        with self._changed:
            self._abandoned = max(self._abandoned, attempt, key=lambda known: known.number)
            if self._save.attempt.number <= attempt.number:
                self._leave(self._save)
            self._changed.notify_all()

    def leave(self, save: GatedSave) -> None:
        """This save will not be finished."""
        with self._changed:
            self._leave(save)
            self._changed.notify_all()

    def _leave(self, save: GatedSave) -> None:
        save.abandoned = True
        for layer in list(save.copies):
            self._drop_copy(save, layer)

    def pieces(self, save: GatedSave) -> Iterator[Piece]:
        """The shard's state, layer after layer in parts, each once it has the generation.

        Raises MegatrainError when the save was abandoned or a shard failed, DeadlineError when updates do not get on.
        """
        left = list(self._order)
        while left:
            layer = self._next(save, left)
            left.remove(layer)
            yield from self._read(save, layer)

    def _next(self, save: GatedSave, left: Sequence[int]) -> int:
        """The layer that an update waits for; else, before those that no update changes, the one whose next update
        comes last. In the order of updates the writer would always be reading just the layer that is to be updated, and
        nothing would be copied ahead of it."""
        generation = save.attempt.step
        self._await_generation(save, left[0])
        there = [layer for layer in left if self._words.shard_generation(self._index, layer) >= generation]
        with self._changed:
            waiting = [layer for layer in there if save.states[layer] is LayerState.WAITING]
            if save.wanted in waiting:
                return save.wanted
            return waiting[-1] if waiting else there[0]

    def _await_generation(self, save: GatedSave, layer: int) -> None:
        """Hears within WATCH_S that the save was abandoned."""
        # A save begins when its step is submitted, which may be while the step before it runs.
        deadline_s = time.monotonic() + 2 * STEP_DEADLINE_S + self._timeout_s
        while True:
            if save.abandoned:
                raise _abandoned(save.attempt)
            try:
                self._words.wait_shard_generation(self._index, layer, save.attempt.step, WATCH_S)
            except DeadlineError:
                if time.monotonic() > deadline_s:
                    raise
            else:
                return

    def done(self, save: GatedSave, part: Piece) -> None:
        """The part was read: its bytes are not needed any more."""
        layer = self._layers[part.layer]
        with self._changed:
            if save.abandoned:
                return
            save.in_hand[layer] -= 1
            if not save.in_hand[layer] and not save.to_come[layer]:
                self._drop_copy(save, layer)
                self._set(save, layer, LayerState.WRITTEN)
            self._changed.notify_all()

    def enter(self, layer: int, update: int) -> None:
        """Returns when the layer may be overwritten by `update`.

        Raises DeadlineError when the save does not get on, MegatrainError when the shards were stopped meanwhile.
        """
        if not self._words.saved_at(update - 1):
            return
        start_s = time.monotonic()
        with self._changed:
            self._wait(lambda: self._known() >= update - 1, f"the save of step {update - 1} to begin")
            save = self._save
            if save.attempt.step != update - 1 or save.abandoned:
                return
            with self._shard.spans.span(Row.UPDATES, "wait save", layer, waits=True):
                memory = self._let_go(save, layer)
        if memory is not None:
            with self._shard.spans.span(Row.UPDATES, "copy", layer, num_bytes=self._shard.copy_bytes(layer)):
                self._copy(save, layer, memory)
        save.stall_s += time.monotonic() - start_s

    def _known(self) -> int:
        """The newest step whose save was begun or abandoned."""
        return max(self._save.attempt.step, self._abandoned.step)

    def _let_go(self, save: GatedSave, layer: int) -> Tensor | None:
        """Waits until the writer does not read the layer: memory to copy it to, or None where that is not needed."""
        memory = self._memory_for_copy(save, layer)
        if memory is None:
            save.wanted = layer
        else:
            self._set(save, layer, LayerState.COPYING)
        self._wait(
            lambda: save.abandoned or save.states[layer] in SETTLED or not (memory is None or save.in_hand[layer]),
            f"layer {layer} of the save of step {save.attempt.step} to be written",
        )
        if memory is not None and (save.abandoned or save.states[layer] in SETTLED):  # its last part was in hand
            self._spare.give_back(memory)
            return None
        return memory

    def _memory_for_copy(self, save: GatedSave, layer: int) -> Tensor | None:
        if save.states[layer] in SETTLED:
            return None
        return self._spare.take(self._shard.copy_bytes(layer))

    def _copy(self, save: GatedSave, layer: int, memory: Tensor) -> None:
        parts = _cut(self._shard.copy_layer(layer, memory))
        with self._changed:
            save.copies[layer] = _Copy(parts, memory)
            if save.abandoned:
                self._drop_copy(save, layer)
            self._set(save, layer, LayerState.COPIED)

    def _drop_copy(self, save: GatedSave, layer: int) -> None:
        copy = save.copies.pop(layer, None)
        if copy is not None:
            self._spare.give_back(copy.memory)

    def _read(self, save: GatedSave, layer: int) -> Iterator[Piece]:
        """From the state, and from a copy as soon as there is one."""
        parts = _cut(self._shard.pieces(layer))
        with self._changed:
            save.to_come[layer] = len(parts)
        for index, part in enumerate(parts):
            with self._changed:
                self._wait(
                    lambda: save.abandoned or save.states[layer] is not LayerState.COPYING,
                    f"layer {layer} to be copied",
                )
                if save.abandoned:
                    raise _abandoned(save.attempt)
                copy = save.copies.get(layer)
                if copy is None and save.states[layer] not in SETTLED:  # what is frozen never changes
                    self._set(save, layer, LayerState.READING)
                save.to_come[layer] -= 1
                save.in_hand[layer] += 1
            yield self._shard.fetch(part) if copy is None else copy.parts[index]

    def _set(self, save: GatedSave, layer: int, state: LayerState) -> None:
        save.states[layer] = state
        self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """With the condition held."""
        deadline_s = time.monotonic() + self._timeout_s
        while not self._changed.wait_for(ready, WATCH_S):
            self._words.check()
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"optimizer shard {self._words.number_of(self._index)} waited {self._timeout_s:.0f} s for {what}"
                )


def _cut(pieces: Iterable[Piece]) -> list[Piece]:
    return [part for piece in pieces for part in piece.cut(STORED_BYTES)]


def _abandoned(attempt: SaveAttempt) -> MegatrainError:
    return MegatrainError(f"the save of step {attempt.step} was abandoned")
