"""SaveGate: keeps a shard's layers at the generation that a save wants until they are written, or copied aside.

A save is one generation of the whole model, and training goes on meanwhile: a layer is written after its update n and
before its update n + 1. An update that comes before its layer was written copies the layer's part into spare RAM, and
waits only where there is none left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from megatrain_ray.engine.host_words import HostWords
from megatrain_ray.engine.shard import AdamShard
from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.pieces import Piece

WATCH_S = 1.0  # an update that waits looks at the stop word at least this often


class LayerState(Enum):
    """Of a layer's part in a save."""

    WAITING = "in the state, which must not change"
    COPYING = "being copied aside"
    COPIED = "in a copy; the state may change"
    READING = "being written from the state, which must not change"
    WRITTEN = "in the blobs; the state may change"


FREE = (LayerState.COPIED, LayerState.WRITTEN)


@dataclass
class _Save:
    """The save that is under way, or the last one."""

    generation: int
    states: dict[int, LayerState]
    copies: dict[int, list[Piece]] = field(default_factory=dict)
    unread: dict[int, int] = field(default_factory=dict)  # pieces of a layer that are not in the blobs yet
    copied_bytes: int = 0
    stall_s: float = 0.0
    abandoned: bool = False


class SaveGate:
    """One save at a time: one thread reads `pieces` and calls `done`, another one calls `enter` before updates."""

    def __init__(
        self, shard: AdamShard, words: HostWords, order: Sequence[int], copy_bytes: int, timeout_s: float
    ) -> None:
        """`order`: in which updates visit layers. `copy_bytes`: of spare RAM for copies. `timeout_s`: of any wait."""
        self._shard = shard
        self._words = words
        self._order = order
        self._copy_bytes = copy_bytes
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._layers = {flat.name: i for i, flat in enumerate(shard.layout.model.layers)}
        self._save = _Save(-1, {}, abandoned=True)

    @property
    def stall_s(self) -> float:
        """Seconds that updates were held up by the newest save."""
        return self._save.stall_s

    def begin(self, generation: int) -> None:
        """A save of this generation begins; the one before has ended."""
        with self._changed:
            self._save = _Save(generation, dict.fromkeys(self._order, LayerState.WAITING))
            self._changed.notify_all()

    def abandon(self, generation: int) -> None:
        """Saves up to this generation will not be finished: no update waits for them, and their writer fails."""
        with self._changed:
            if generation > self._save.generation:
                self._save = _Save(generation, {})
            self._save.abandoned = self._save.generation <= generation
            self._changed.notify_all()

    def pieces(self) -> Iterator[Piece]:
        """The shard's part, each layer as soon as it has the generation, in the order of updates.

        Raises MegatrainError when the save was abandoned or a shard failed, DeadlineError when updates do not get on.
        """
        save = self._save
        for layer in self._order:
            self._words.wait_shard_generation(self._shard.layout.index, layer, save.generation, self._timeout_s)
            yield from self._read(save, layer)

    def done(self, piece: Piece) -> None:
        """The piece is in its blob: its bytes are not needed any more."""
        save, layer = self._save, self._layers[piece.layer]
        with self._changed:
            save.unread[layer] -= 1
            if not save.unread[layer]:
                save.copied_bytes -= _nbytes(save.copies.pop(layer, []))
                self._set(save, layer, LayerState.WRITTEN)

    def enter(self, layer: int, update: int) -> None:
        """Returns when the layer may be overwritten by `update`.

        Raises DeadlineError when the save does not get on, MegatrainError when the shards were stopped meanwhile.
        """
        if not self._words.saved_at(update - 1):
            return
        start_s = time.monotonic()
        with self._changed:
            self._wait(lambda: self._save.generation >= update - 1, f"the save of step {update - 1} to begin")
            save = self._save
            copying = save.generation == update - 1 and self._may_copy(save, layer)
            if copying:
                self._set(save, layer, LayerState.COPYING)
        if copying:
            self._copy(save, layer)
        elif save.generation == update - 1:
            with self._changed:
                self._wait(
                    lambda: save.abandoned or save.states[layer] in FREE,
                    f"layer {layer} of the save of step {update - 1} to be written",
                )
        save.stall_s += time.monotonic() - start_s

    def _may_copy(self, save: _Save, layer: int) -> bool:
        if save.abandoned or save.states[layer] is not LayerState.WAITING:
            return False
        return save.copied_bytes + _nbytes(self._shard.pieces(layer)) <= self._copy_bytes

    def _copy(self, save: _Save, layer: int) -> None:
        copy = self._shard.copy_layer(layer)
        with self._changed:
            save.copies[layer] = copy
            save.copied_bytes += _nbytes(copy)
            self._set(save, layer, LayerState.COPIED)

    def _read(self, save: _Save, layer: int) -> list[Piece]:
        with self._changed:
            self._wait(
                lambda: save.abandoned or save.states[layer] is not LayerState.COPYING,
                f"layer {layer} to be copied",
            )
            if save.abandoned:
                raise MegatrainError(f"the save of step {save.generation} was abandoned")
            pieces = save.copies.get(layer) or list(self._shard.pieces(layer))
            save.unread[layer] = len(pieces)
            if not pieces:
                self._set(save, layer, LayerState.WRITTEN)
            elif save.states[layer] is LayerState.WAITING:
                self._set(save, layer, LayerState.READING)
            return pieces

    def _set(self, save: _Save, layer: int, state: LayerState) -> None:
        save.states[layer] = state
        self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """With the condition held."""
        deadline_s = time.monotonic() + self._timeout_s
        while not self._changed.wait_for(ready, WATCH_S):
            self._words.check()
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"optimizer shard {self._shard.layout.index} waited {self._timeout_s:.0f} s for {what}"
                )


def _nbytes(pieces: Iterable[Piece]) -> int:
    return sum(len(buffer) for piece in pieces for buffer in piece.buffers)
