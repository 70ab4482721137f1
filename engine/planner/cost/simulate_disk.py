"""Simulates what updates read from disk and write to it in a step, as SpillRing does it."""

from __future__ import annotations

from collections.abc import Callable

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.memory.spill_bytes import room_in_slots
from megatrain_ray.virtual_clock import Op, Stage

Run = Callable[..., float]  # Clocks.run: submits an operation that begins after some times, and returns when it ends


class SimulatedSpill:
    """Simulates the slots that parts of spilled layers take in turn.

    Gradients take them in the backward, gradients and state in the update. The disk does one operation at a time, at
    the rate of the whole disk.
    """

    def __init__(self, plan: Plan, layout: ModelLayout, run: Run) -> None:
        self._run = run
        sizes = layout.host_trained_sizes
        self._gradient_bytes = {i: sizes[i] * plan.gradients.offload_dtype.itemsize for i in plan.gradients_on_disk}
        precision, self._weights_on_disk = plan.precision, plan.weights_on_disk
        item_bytes = {True: precision.element_bytes, False: precision.state_bytes}  # with the working copy or without
        self._state_bytes = {i: sizes[i] * item_bytes[i in self._weights_on_disk] for i in plan.spilled_layers}
        moved = self._gradient_bytes.keys() | self._state_bytes.keys()
        self._order = [layer for layer in plan.layer_order if layer in moved]
        self._read_bytes = {i: self._gradient_bytes.get(i, 0) + self._state_bytes.get(i, 0) for i in self._order}
        self._room = room_in_slots(plan, layout)
        self._ahead: dict[int, tuple[int, float]] = {}  # by layer: bytes read ahead, and when they are there
        self._stored_s = 0.0  # when the gradient that was stored last is on disk

    def store(self, layer: int, landed_s: float) -> float:
        """Store a layer's gradient, and return when it is out of the slab (s).

        Bytes that slots have no room for are on disk by then.

        landed_s: when the gradient is on the host.
        """
        num_bytes = self._gradient_bytes[layer]
        out_s = max(landed_s, self._stored_s)
        if num_bytes > self._room:
            out_s = self._move("store", layer, num_bytes - self._room, out_s)
        self._stored_s = self._move("store", layer, min(num_bytes, self._room), out_s)
        return out_s

    def bring(self, layer: int, wanted_s: float) -> float:
        """Return when all of the layer is in memory (s); 0 for a layer that always is.

        Bytes of its state that slots have no room for are written before that.

        wanted_s: when its update may begin.
        """
        if layer not in self._read_bytes:
            return 0.0
        if not self._ahead:  # nothing was read ahead: this is the first update, or gradients had the slots
            self._read_ahead(0, wanted_s if self._gradient_bytes else 0.0)
        num_bytes = self._read_bytes[layer]
        ahead, there_s = self._ahead.pop(layer, (0, 0.0))
        if ahead < num_bytes:
            there_s = self._move("read", layer, num_bytes - ahead, max(wanted_s, there_s))
        if (of_state := self._state_bytes.get(layer, 0)) > self._room:
            there_s = self._move("write", layer, of_state - self._room, there_s)
        return there_s

    def leave(self, layer: int, updated_s: float) -> float:
        """Write the layer's state after its update, read ahead, and return when its working copy may be read (s)."""
        if layer not in self._read_bytes:
            return updated_s
        written_s = updated_s
        if of_state := self._state_bytes.get(layer):
            written_s = self._move("write", layer, min(of_state, self._room), updated_s)
        self._read_ahead(self._order.index(layer) + 1, written_s)
        return written_s if layer in self._weights_on_disk else updated_s

    def _read_ahead(self, at: int, after_s: float) -> None:
        """Read what updates need from position `at` of their order on, as far as slots have room for it.

        Nothing is read for the next step's updates if gradients are stored, because those take the slots first.
        """
        room = self._room - sum(num_bytes for num_bytes, _ in self._ahead.values())
        for layer in self._order[at:] + (self._order[:at] if not self._gradient_bytes else []):
            if not room:
                return
            ahead, there_s = self._ahead.get(layer, (0, 0.0))
            num_bytes = min(room, self._read_bytes[layer] - ahead)
            if num_bytes:
                there_s = self._move("read", layer, num_bytes, after_s)
                self._ahead[layer] = ahead + num_bytes, there_s
                room -= num_bytes

    def _move(self, name: str, layer: int, num_bytes: int, after_s: float) -> float:
        return self._run(Stage.DISK, Op(name, layer, num_bytes=num_bytes), after_s)
