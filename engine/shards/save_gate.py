"""Keeps a shard's layers at the generation that a save wants until they are written or copied aside.

A save is one generation of the whole model, and training goes on meanwhile. A layer is written after its update n and
before its update n + 1. If an update comes before its layer is written, it first copies the layer's part into spare
RAM. It waits for the disk only if no spare RAM is left. Layers are written in parts, so a layer can be copied even
while it is being written: the writer then goes on with the copy.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.engine.device.deadlines import STEP_DEADLINE_S
from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.shards.shard_state import ShardState
from megatrain_ray.engine.shards.snapshot_buffers import SnapshotBuffers
from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.saves.manifest import PartManifest
from megatrain_ray.io.saves.save_folder import write_part
from megatrain_ray.io.saves.save_writer import STORED_BYTES, Piece
from megatrain_ray.spans import Row

WATCH_S = 1.0  # a waiting update checks the stop word at least this often


class LayerState(Enum):
    """Says where a save reads a layer's part from, and whether an update may change the state."""

    WAITING = "in the state, which must not change"
    COPYING = "being copied aside"
    COPIED = "in a copy, or parts of it written; the state may change"
    READING = "parts are written, from the state, which must not change"
    WRITTEN = "in the blobs; the state may change"


SETTLED = (LayerState.COPIED, LayerState.WRITTEN)


class _LayerCopy(NamedTuple):
    parts: list[Piece]
    memory: Tensor


class SaveAttempt(NamedTuple):
    """Identifies one attempt to save a step."""

    step: int
    number: int  # grows with every attempt of the run, since a save that failed is attempted again


NO_ATTEMPT = SaveAttempt(-1, -1)
EVERY_ATTEMPT = SaveAttempt(sys.maxsize, sys.maxsize)


@dataclass
class GatedSave:
    """Tracks a shard's part of one save."""

    attempt: SaveAttempt
    states: dict[int, LayerState]
    copies: dict[int, _LayerCopy] = field(default_factory=dict)
    num_reading: Counter[int] = field(default_factory=Counter)  # by layer: parts that the writer is reading
    num_unread: Counter[int] = field(default_factory=Counter)  # by layer: parts that the writer has not begun to read
    stall_s: float = 0.0  # for which updates were held up
    wanted: int | None = None  # layer that an update waits for
    abandoned: bool = False


@dataclass(frozen=True)
class WrittenPart:
    """Describes a shard's part of a save after it was written."""

    part: PartManifest
    stall_s: float  # for which it held up updates
    write_s: float


class SaveGate:
    """Coordinates a thread that writes one save at a time with a thread that updates the same layers.

    The writing thread calls `write_part`, which reads `pieces` and calls `part_read`. The updating thread calls
    `before_update` before each update. State that is still read for an abandoned save may be overwritten meanwhile,
    because what was read is thrown away.
    """

    def __init__(
        self, shard: ShardState, words: SharedUpdateState, index: int, order: Sequence[int], spare: SnapshotBuffers,
        timeout_s: float,
    ) -> None:  # fmt: skip
        """Create the gate, with no save running.

        index: number of the shard in `words`.
        order: layers in the order in which updates visit them. Layers that no update visits are written while nothing
            else is ready.
        spare: RAM for copies of layers.
        timeout_s: limit of every wait.
        """
        self._shard = shard
        self._words = words
        self._index = index
        self._order = (*shard.layout.model.fixed, *order)
        self._spare = spare
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._layers = {flat.name: i for i, flat in enumerate(shard.layout.model.layers)}
        self._save = GatedSave(NO_ATTEMPT, {}, abandoned=True)
        self._abandoned = NO_ATTEMPT  # the newest attempt that is known to be abandoned

    def write_part(
        self, number: int, save_folder: Path, attempt: SaveAttempt, compression: SaveCompression
    ) -> WrittenPart:
        """Write part `number` of the save of a step, each layer once it has had that step's update."""
        start_s = time.monotonic()
        save = self.begin(attempt)
        pieces, part_read = self.pieces(save), partial(self.part_read, save)
        try:
            part = asyncio.run(write_part(save_folder, number, pieces, part_read, compression, self._shard.spans))
        except BaseException:
            self.abandon(attempt)
            raise
        return WrittenPart(part, save.stall_s, time.monotonic() - start_s)

    def begin(self, attempt: SaveAttempt) -> GatedSave:
        """Begin a save of generation `attempt.step`. An earlier save that has not ended is abandoned.

        Raises MegatrainError if this attempt was abandoned already, since calls may overtake each other.
        """
        with self._changed:
            if attempt.number <= self._abandoned.number:
                raise _abandoned(attempt)
            self._release_copies(self._save)
            states = {i: LayerState.WAITING if self._shard.copy_bytes(i) else LayerState.WRITTEN for i in self._order}
            self._save = GatedSave(attempt, states)
            self._changed.notify_all()
            return self._save

    def abandon(self, attempt: SaveAttempt) -> None:
        """Abandon all attempts up to this one: no update waits for them any more, and their writers fail."""
        with self._changed:
            self._abandoned = max(self._abandoned, attempt, key=lambda known: known.number)
            if self._save.attempt.number <= attempt.number:
                self._release_copies(self._save)
            self._changed.notify_all()

    def _release_copies(self, save: GatedSave) -> None:
        save.abandoned = True
        for layer in list(save.copies):
            self._drop_copy(save, layer)

    def pieces(self, save: GatedSave) -> Iterator[Piece]:
        """Yield the shard's state layer after layer, in parts, each layer once it has the save's generation.

        Raises MegatrainError if the save was abandoned or a shard failed, DeadlineError if updates make no progress.
        """
        left = list(self._order)
        while left:
            layer = self._next(save, left)
            left.remove(layer)
            yield from self._read(save, layer)

    def _next(self, save: GatedSave, left: Sequence[int]) -> int:
        """Return the layer to write next.

        A layer that an update waits for comes first. Next comes the layer whose update lies furthest in the future.
        Layers that no update can change any more come last. In the order of updates, the writer would always be reading
        the very layer that is updated next, and no layer would be copied aside in time.
        """
        self._await_generation(save, left[0])
        reached = self._words.generations.of_shard
        there = [layer for layer in left if reached(self._index, layer) >= save.attempt.step]
        with self._changed:
            waiting = [layer for layer in there if save.states[layer] is LayerState.WAITING]
            if save.wanted in waiting:
                return save.wanted
            return waiting[-1] if waiting else there[0]

    def _await_generation(self, save: GatedSave, layer: int) -> None:
        """Wait until the shard's part of the layer has the save's generation.

        Raises MegatrainError within about WATCH_S after the save was abandoned, DeadlineError if the generation does
        not come.
        """
        # A save begins when its step is submitted, which may be while the step before it runs.
        deadline_s = time.monotonic() + 2 * STEP_DEADLINE_S + self._timeout_s
        while True:
            if save.abandoned:
                raise _abandoned(save.attempt)
            try:
                self._words.generations.wait(self._index, layer, save.attempt.step, WATCH_S)
            except DeadlineError:
                if time.monotonic() > deadline_s:
                    raise
            else:
                return

    def part_read(self, save: GatedSave, part: Piece) -> None:
        """Note that the part was read, so its bytes are no longer needed."""
        layer = self._layers[part.layer]
        with self._changed:
            if save.abandoned:
                return
            save.num_reading[layer] -= 1
            if not save.num_reading[layer] and not save.num_unread[layer]:
                self._drop_copy(save, layer)
                self._set(save, layer, LayerState.WRITTEN)
            self._changed.notify_all()

    def before_update(self, layer: int, update: int) -> None:
        """Wait until the layer may be overwritten by `update`. If there is spare RAM, copy the layer aside for that.

        Raises DeadlineError if the save makes no progress, MegatrainError if the shards were stopped meanwhile.
        """
        if not self._words.updates.saved_at(update - 1):
            return
        start_s = time.monotonic()
        with self._changed:
            self._wait(
                lambda: max(self._save.attempt.step, self._abandoned.step) >= update - 1,
                f"the save of step {update - 1} to begin",
            )
            save = self._save
            if save.attempt.step != update - 1 or save.abandoned:
                return
            with self._shard.spans.span(Row.UPDATES, "wait save", layer, waits=True):
                memory = self._await_change(save, layer)
        if memory is not None:
            with self._shard.spans.span(Row.UPDATES, "copy", layer, num_bytes=self._shard.copy_bytes(layer)):
                self._copy(save, layer, memory)
        save.stall_s += time.monotonic() - start_s

    def _await_change(self, save: GatedSave, layer: int) -> Tensor | None:
        """Wait until an update may change the layer, or may do so after copying it aside.

        Returns memory for the copy, or None if no copy is needed. If there is no memory, it waits until the layer is
        written.
        """
        is_settled = save.states[layer] in SETTLED
        memory = None if is_settled else self._spare.take(self._shard.copy_bytes(layer))
        if memory is None:
            save.wanted = layer
        else:
            self._set(save, layer, LayerState.COPYING)
        self._wait(
            lambda: save.abandoned or save.states[layer] in SETTLED or not (memory is None or save.num_reading[layer]),
            f"layer {layer} of the save of step {save.attempt.step} to be written",
        )
        # The copy is not needed if the save was abandoned or the writer finished the layer's last part meanwhile.
        if memory is not None and (save.abandoned or save.states[layer] in SETTLED):
            self._spare.give_back(memory)
            return None
        return memory

    def _copy(self, save: GatedSave, layer: int, memory: Tensor) -> None:
        parts = _cut(self._shard.copy_layer(layer, memory))
        with self._changed:
            save.copies[layer] = _LayerCopy(parts, memory)
            if save.abandoned:
                self._drop_copy(save, layer)
            self._set(save, layer, LayerState.COPIED)

    def _drop_copy(self, save: GatedSave, layer: int) -> None:
        copy = save.copies.pop(layer, None)
        if copy is not None:
            self._spare.give_back(copy.memory)

    def _read(self, save: GatedSave, layer: int) -> Iterator[Piece]:
        parts = _cut(self._shard.pieces(layer))
        with self._changed:
            save.num_unread[layer] = len(parts)
        for index, part in enumerate(parts):
            with self._changed:
                self._wait(
                    lambda: save.abandoned or save.states[layer] is not LayerState.COPYING,
                    f"layer {layer} to be copied",
                )
                if save.abandoned:
                    raise _abandoned(save.attempt)
                copy = save.copies.get(layer)
                if copy is None and save.states[layer] not in SETTLED:  # a frozen layer is WRITTEN from the start
                    self._set(save, layer, LayerState.READING)
                save.num_unread[layer] -= 1
                save.num_reading[layer] += 1
            yield self._shard.fetch(part) if copy is None else copy.parts[index]

    def _set(self, save: GatedSave, layer: int, state: LayerState) -> None:
        save.states[layer] = state
        self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready` returns true, with the condition held. Raises DeadlineError after `timeout_s`."""
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
