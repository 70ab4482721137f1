"""Simulates what waits for room in host buffers: the slab, upload buffers of working copies, and Muon's directions."""

from __future__ import annotations

from collections import deque

import torch

from megatrain_ray.engine.layout.model_layout import DIRECTION_BYTES, ModelLayout
from megatrain_ray.engine.optimizer.muon import largest_part
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.planner.cost.simulate_disk import Run
from megatrain_ray.engine.planner.cost.stage_clocks import Clocks, Ring
from megatrain_ray.virtual_clock import Op, Stage


class SimulatedSlab:
    """Simulates the part of the slab that gradients pass through; it lies after the gradients that stay in the slab.

    It is used with clipping. Gradients leave in the order in which they came.
    """

    def __init__(self, plan: Plan, layout: ModelLayout) -> None:
        sizes = layout.gradient_bytes(plan.gradients.slab_itemsize, plan.never_in_slab)
        self._sizes = {layer: sizes[layer] for layer in (*plan.deferred_offload_layers, *plan.gradients_on_disk)}
        self._room = plan.gradients.slab_bytes - sum(size for i, size in enumerate(sizes) if i not in self._sizes)
        self._held: deque[int] = deque()
        self._left_s: dict[int, float] = {}

    def take(self, layer: int) -> float:
        """Return from when on there is room for the layer's gradient (s), and take it; 0 for a gradient that stays."""
        if layer not in self._sizes:
            return 0.0
        room_s = 0.0
        while sum(self._sizes[i] for i in (*self._held, layer)) > self._room:
            room_s = max(room_s, self._left_s[self._held.popleft()])
        self._held.append(layer)
        return room_s

    def leave(self, layer: int, at_s: float) -> None:
        """Release the layer's room at a time (s)."""
        self._left_s[layer] = at_s


class SimulatedWindows:
    """Simulates the windows that fragments of working copies take in turn on their way from disk to the device.

    What updates read and write meanwhile has a clock of its own. The price of a read allows for that (op_costs.py).
    """

    def __init__(self, plan: Plan, layout: ModelLayout, run: Run) -> None:
        self._run = run
        self._layers = plan.weights_on_disk
        self._fragments = [layer.fragments for layer in layout.layers]
        self._itemsize = plan.precision.working_dtype.itemsize
        self._empty_s = deque([0.0] * plan.disk.num_upload_buffers)

    def fill(self, fragment: FragmentId, written_s: float, start_s: float) -> float:
        """Return when a fragment is in host memory (s).

        written_s: when its generation is on disk.
        start_s: when the step began.
        """
        if fragment.layer not in self._layers:
            return written_s
        num_bytes = self._fragments[fragment.layer][fragment.index].size * self._itemsize
        op = Op("weights", fragment.layer, fragment=fragment.index, num_bytes=num_bytes)
        return self._run(Stage.WEIGHTS, op, self._empty_s.popleft(), written_s, start_s)

    def leave(self, fragment: FragmentId, uploaded_s: float) -> None:
        if fragment.layer in self._layers:
            self._empty_s.append(uploaded_s)


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
        self._arrived_s[layer] = self._clocks.run(Stage.H2D, op, self._momenta.empty(layer), after_s)

    def make(self, layer: int) -> None:
        self._clocks.wait(self._arrived_s.pop(layer), "h2d")
        self._clocks.wait(self._directions.empty(layer), "d2h")
        self._momenta.leave(layer, self._clocks.run(Stage.COMPUTE, Op("orthogonalize", layer)))

    def leave(self, layer: int) -> float:
        """Offload a layer's directions, and return when they are on the host (s)."""
        op = Op("complete", layer, num_bytes=self._bytes(layer, DIRECTION_BYTES))
        end_s = self._clocks.run(Stage.D2H, op, self._clocks.computed_s)
        self._directions.leave(layer, end_s)
        return end_s

    def _bytes(self, layer: int, itemsize: int) -> int:
        """Return the bytes that one GPU moves for the layer: an equal share, as each has of all layers together."""
        return self._layout.layers[layer].trained.size * itemsize // self._num_gpus
