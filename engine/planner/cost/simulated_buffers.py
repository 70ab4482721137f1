"""Simulates what waits for room in buffers: gradients, working copies, spilled state, and Muon's directions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from megatrain_ray.engine.layout.model_layout import DIRECTION_BYTES, ModelLayout
from megatrain_ray.engine.optimizer.muon import largest_part
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.planner.cost.stage_clocks import Clocks, Ring
from megatrain_ray.engine.planner.memory.spill_bytes import room_in_slots
from megatrain_ray.virtual_clock import Op, Stage

Run = Callable[..., float]  # Clocks.run: submits an operation that begins after some times, and returns when it ends


class SimulatedSlab:
    """Simulates the part of the slab that gradients pass through; it lies after the gradients that stay in the slab.

    It is used with clipping. Gradients leave in the order in which they came.
    """

    def __init__(self, plan: Plan, layout: ModelLayout) -> None:
        sizes = layout.gradient_bytes(plan.gradients.slab_itemsize, plan.never_in_slab)
        self._sizes = {layer: sizes[layer] for layer in (*plan.deferred_offload_layers, *plan.gradients_on_disk)}
        self._room = plan.gradients.slab_bytes - sum(size for i, size in enumerate(sizes) if i not in self._sizes)
        self._held: deque[int] = deque()
        self._released_s: dict[int, float] = {}

    def allocate(self, layer: int) -> float:
        """Return from when on there is room for the layer's gradient (s), and take it; 0 for a gradient that stays."""
        if layer not in self._sizes:
            return 0.0
        room_s = 0.0
        while sum(self._sizes[i] for i in (*self._held, layer)) > self._room:
            room_s = max(room_s, self._released_s[self._held.popleft()])
        self._held.append(layer)
        return room_s

    def release(self, layer: int, at_s: float) -> None:
        """Release the layer's room at a time (s)."""
        self._released_s[layer] = at_s


class SimulatedUploadBuffers:
    """Simulates the host buffers that fragments of working copies take in turn on their way from disk to the device.

    What updates read and write meanwhile has a clock of its own. The price of a read allows for that (op_costs.py).
    """

    def __init__(self, plan: Plan, layout: ModelLayout, run: Run) -> None:
        self._run = run
        self._layers = plan.weights_on_disk
        self._fragments = [layer.fragments for layer in layout.layers]
        self._itemsize = plan.precision.working_dtype.itemsize
        self._empty_s = deque([0.0] * plan.disk.num_upload_buffers)

    def read(self, fragment: FragmentId, written_s: float, start_s: float) -> float:
        """Return when a fragment is in host memory (s).

        written_s: when its generation is on disk.
        start_s: when the step began.
        """
        if fragment.layer not in self._layers:
            return written_s
        num_bytes = self._fragments[fragment.layer][fragment.index].size * self._itemsize
        op = Op("weights", fragment.layer, fragment=fragment.index, num_bytes=num_bytes)
        return self._run(Stage.WEIGHTS, op, self._empty_s.popleft(), written_s, start_s)

    def release(self, fragment: FragmentId, uploaded_s: float) -> None:
        if fragment.layer in self._layers:
            self._empty_s.append(uploaded_s)


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
        self._loaded: dict[int, tuple[int, float]] = {}  # by layer: bytes read ahead, and when they are there
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

    def load(self, layer: int, wanted_s: float) -> float:
        """Return when all of the layer is in memory (s); 0 for a layer that always is.

        Bytes of its state that slots have no room for are written before that.

        wanted_s: when its update may begin.
        """
        if layer not in self._read_bytes:
            return 0.0
        if not self._loaded:  # nothing was read ahead: this is the first update, or gradients had the slots
            self._read_ahead(0, wanted_s if self._gradient_bytes else 0.0)
        num_bytes = self._read_bytes[layer]
        ahead, there_s = self._loaded.pop(layer, (0, 0.0))
        if ahead < num_bytes:
            there_s = self._move("read", layer, num_bytes - ahead, max(wanted_s, there_s))
        if (state_bytes := self._state_bytes.get(layer, 0)) > self._room:
            there_s = self._move("write", layer, state_bytes - self._room, there_s)
        return there_s

    def write_back(self, layer: int, updated_s: float) -> float:
        """Write the layer's state after its update, read ahead, and return when its working copy may be read (s)."""
        if layer not in self._read_bytes:
            return updated_s
        written_s = updated_s
        if state_bytes := self._state_bytes.get(layer):
            written_s = self._move("write", layer, min(state_bytes, self._room), updated_s)
        self._read_ahead(self._order.index(layer) + 1, written_s)
        return written_s if layer in self._weights_on_disk else updated_s

    def _read_ahead(self, at: int, after_s: float) -> None:
        """Read what updates need from position `at` of their order on, as far as slots have room for it.

        Nothing is read for the next step's updates if gradients are stored, because those take the slots first.
        """
        room = self._room - sum(num_bytes for num_bytes, _ in self._loaded.values())
        for layer in self._order[at:] + (self._order[:at] if not self._gradient_bytes else []):
            if not room:
                return
            ahead, there_s = self._loaded.get(layer, (0, 0.0))
            num_bytes = min(room, self._read_bytes[layer] - ahead)
            if num_bytes:
                there_s = self._move("read", layer, num_bytes, after_s)
                self._loaded[layer] = ahead + num_bytes, there_s
                room -= num_bytes

    def _move(self, name: str, layer: int, num_bytes: int, after_s: float) -> float:
        return self._run(Stage.DISK, Op(name, layer, num_bytes=num_bytes), after_s)


class SimulatedDirections:
    """Simulates Muon's directions of one step after the other, layer by layer."""

    def __init__(self, plan: Plan, layout: ModelLayout, clocks: Clocks) -> None:
        self._layout = layout
        self._num_gpus = plan.hosts.num_gpus
        self._clocks = clocks
        layers = tuple(reversed(layout.with_muon))
        sizes = [largest_part(layout.layers[layer], plan.hosts.num_gpus) for layer in layers]
        self._momenta = Ring(layers, [size * torch.float32.itemsize for size in sizes], plan.slots.momentum_bytes)
        self._directions = Ring(layers, [size * DIRECTION_BYTES for size in sizes], plan.slots.direction_bytes)
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._momenta.begin()
        self._directions.begin()
        self._arrived_s: dict[int, float] = {}

    def fetch_momentum(self, layer: int, after_s: float) -> None:
        op = Op("momentum", layer, num_bytes=self._bytes(layer, torch.float32.itemsize))
        self._arrived_s[layer] = self._clocks.run(Stage.H2D, op, self._momenta.empty_s(layer), after_s)

    def orthogonalize(self, layer: int) -> None:
        self._clocks.wait(self._arrived_s.pop(layer), "h2d")
        self._clocks.wait(self._directions.empty_s(layer), "d2h")
        self._momenta.release(layer, self._clocks.run(Stage.COMPUTE, Op("orthogonalize", layer)))

    def offload(self, layer: int) -> float:
        """Offload a layer's directions, and return when they are on the host (s)."""
        op = Op("complete", layer, num_bytes=self._bytes(layer, DIRECTION_BYTES))
        end_s = self._clocks.run(Stage.D2H, op, self._clocks.computed_s)
        self._directions.release(layer, end_s)
        return end_s

    def _bytes(self, layer: int, itemsize: int) -> int:
        """Return the bytes that one GPU moves for the layer: an equal share, as each has of all layers together."""
        return self._layout.layers[layer].trained.size * itemsize // self._num_gpus
