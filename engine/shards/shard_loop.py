"""Runs the thread that serves one shard's updates, driven by words in shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.host.signal_words import SlabRegion
from megatrain_ray.engine.optimizer.undo_log import serial_of
from megatrain_ray.engine.shards.adam_shard import AdamShard
from megatrain_ray.engine.shards.save_gate import SaveGate
from megatrain_ray.errors import DeadlineError
from megatrain_ray.spans import Row

IDLE_S = 1.0  # a shard checks the stop word at least this often, in case the process that rings the bell has died


class ShardLoop:
    """Applies updates to a shard as their parameters and gradients arrive.

    For each update, layer after layer in `order`, it waits for both, updates the layer and publishes its generation.
    Gradients of the layers in `stored` are moved from the slab to disk as they arrive, before the first
    layer is updated.
    """

    def __init__(
        self, shard: AdamShard, words: SharedUpdateState, slab: Tensor, gradient_dtype: torch.dtype,
        order: Sequence[int], gate: SaveGate, traced: range = range(0),
        ended: Callable[[int], None] = lambda update: None, stored: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Prepare the loop's thread.

        slab: 1-D uint8, shared; holds gradients of `gradient_dtype` at byte offsets.
        order: the layers of which something is trained, in the order of an update.
        traced: updates for which the shard records its spans.
        ended: called on the loop's thread when an update of all layers is done.
        stored: layers among `order` whose gradients wait on disk, in the order of a backward. Their updates are all
            committed after the backward.

        Updates that are done according to the words are not done again. A layer that a killed shard left torn is rolled
        back first.
        """
        self._shard = shard
        self._index = shard.layout.index
        self._words = words
        self._slab = slab
        self._gradient_dtype = gradient_dtype
        self._order = order
        self._stored = stored
        self._gate = gate
        self._traced = traced
        self._ended = ended
        self._error: BaseException | None = None
        # A daemon: a process whose parent forgot to stop it must still be able to exit.
        self._thread = threading.Thread(target=self._run, name=f"shard {self._index}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None) -> None:
        """Wait until the loop ends by stop or failure, and raise what went wrong.

        Raises DeadlineError after `timeout_s`; with None it waits as long as the loop serves.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(
                f"optimizer shard {self._shard.layout.number} did not end within {timeout_s} s of being asked to"
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if torn := self._words.generations.torn(self._index):
                self._shard.roll_back(torn.layer, self._serial(*torn))
            if self._order:
                update = 1 + min(self._words.generations.of_shard(self._index, layer) for layer in self._order)
                while self._serve(update):
                    update += 1
            while not self._words.stopped:  # it serves nothing: everything lives on the device
                self._words.wait_generation_bell(self._words.generation_bell(), IDLE_S)
        except BaseException as error:
            self._error = error
            self._words.fail(self._index)

    def _serve(self, update: int) -> bool:
        """Apply an update to every layer that has not had it. Returns False if told to stop."""
        self._shard.spans.on = update in self._traced
        if not self._store(update):
            return False
        for layer in self._order:
            if self._words.generations.of_shard(self._index, layer) >= update:
                continue
            if not self._await(layer, update, committed=True):
                return False
            self._gate.before_update(layer, update)
            self._words.generations.begin(self._index, layer, update)
            params = self._words.updates.params(update)
            gradient = None if layer in self._stored else self._gradient(layer)
            with_muon = self._shard.layout.model.layers[layer].num_muon > 0
            directions = self._landed(SlabRegion.DIRECTIONS, layer, torch.bfloat16) if with_muon else None
            self._shard.update(layer, gradient, params, self._serial(layer, update), directions)
            self._words.generations.finish(self._index, layer, update)
        self._ended(update)
        return True

    def _store(self, update: int) -> bool:
        """Store those gradients of an update that belong on disk and are not there. Returns False if told to stop."""
        for layer in self._stored:
            if self._words.gradients.stored_by(self._index, layer) >= update:
                continue
            if not self._await(layer, update, committed=False):
                return False
            self._shard.store(layer, self._gradient(layer))
            self._words.gradients.store(self._index, layer, update)
        return True

    def _await(self, layer: int, update: int, *, committed: bool) -> bool:
        """Wait until the layer's gradient has landed, and its update is `committed`. Returns False if told to stop."""
        with self._shard.spans.span(Row.UPDATES, "wait gradient", layer, waits=True):
            while not self._words.gradients.wait_landed(layer, update, IDLE_S, committed=committed):
                if self._words.stopped:
                    return False
        return True

    def _serial(self, layer: int, update: int) -> int:
        return serial_of(update, layer, len(self._shard.layout.model.layers))

    def _gradient(self, layer: int) -> Tensor:
        return self._landed(SlabRegion.GRADIENT, layer, self._gradient_dtype)

    def _landed(self, what: SlabRegion, layer: int, dtype: torch.dtype) -> Tensor:
        start = self._words.gradients.start(what, layer)
        num_bytes = self._shard.layout.model.shares[layer].trained.size * dtype.itemsize
        return self._slab[start : start + num_bytes].view(dtype)
