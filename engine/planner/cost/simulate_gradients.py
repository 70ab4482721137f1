"""Simulates where gradients are during a step, and when they reach the host.

It follows engine/gradients/gradient_store.py and engine/gradients/gradient_offloader.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_groups import UpdateOrder
from megatrain_ray.engine.plan.schedule import WITH_GRADIENT, Visit
from megatrain_ray.engine.planner.cost.simulated_buffers import SimulatedDirections, SimulatedSlab, SimulatedSpill
from megatrain_ray.engine.planner.cost.stage_clocks import Clocks, Ring
from megatrain_ray.virtual_clock import SUM_OVER_GPUS, Op, Stage


class SimulatedGradients:
    """Simulates the gradients of one step after the other.

    A sum is opened, added to and completed; then it leaves the device, or waits there for its update.
    """

    def __init__(self, plan: Plan, layout: ModelLayout, clocks: Clocks, spill: SimulatedSpill) -> None:
        """Set up the regions that gradients take.

        spill: receives gradients that wait on disk.
        """
        self._plan = plan
        self._layout = layout
        self._clocks = clocks
        self._spill = spill
        self._slab = SimulatedSlab(plan, layout)
        self._stored = frozenset(plan.gradients_on_disk)
        self._waiting = plan.gradients_on_device
        updated = tuple(reversed(layout.updated))
        leaving = tuple(layer for layer in updated if layer not in self._waiting)
        summed = leaving if plan.gradients.sums is Tier.HBM else updated
        self._sums = self._ring(summed, plan.slots.gradient_bytes, plan.gradients.accumulate_dtype)
        self._rounded = self._ring(leaving, plan.slots.rounded_bytes, plan.gradients.offload_dtype)
        self._directions = SimulatedDirections(plan, layout, clocks)
        self.begin()

    def _ring(self, layers: Sequence[int], region_bytes: Sequence[int], dtype: torch.dtype) -> Ring:
        return Ring(layers, [self._bytes(layer, dtype) for layer in layers], region_bytes)

    def begin(self) -> None:
        """Begin a step."""
        for part in (self._sums, self._rounded, self._directions):
            part.begin()
        self._with_region: set[int] = set()
        self._stored_s: dict[int, float] = {}  # when a layer's gradient was on the host
        self._fetched_s: dict[int, float] = {}
        self.landed_s: dict[int, float] = {}  # when all that a layer's update needs was on the host

    def adds_gradient(self, visit: Visit) -> bool:
        """Return whether the visit adds to a gradient."""
        return visit.phase in WITH_GRADIENT and self._layout.layers[visit.layer].trained.size > 0

    def prefetch_sum(self, visit: Visit) -> None:
        """Submit the reload of the sum that a coming visit will add to, if sums wait on the host."""
        if self._plan.gradients.sums is Tier.HOST and self.adds_gradient(visit) and visit.micro_batches[0] > 0:
            self._fetched_s[visit.layer] = self._fetch(visit.layer, self._plan.gradients.accumulate_dtype)

    def prefetch_momentum(self, visit: Visit, after_s: float) -> None:
        """Submit the upload of a momentum if the visit completes a gradient whose directions are made at once."""
        if visit.last and self._orthogonalizes_at_once(visit.layer):
            self._directions.fetch_momentum(visit.layer, after_s)

    def wait_for_region(self, layer: int) -> None:
        """Wait until the sum that the layer adds to is on the device, or has an empty region there.

        A gradient that waits on the device needs no region, unless partial sums wait on the host: it has a place of its
        own.
        """
        if layer in self._with_region or self._stays(layer):
            return
        self._with_region.add(layer)
        if layer in self._fetched_s:
            self._clocks.wait(self._fetched_s.pop(layer), "host_accumulation")
        else:
            self._clocks.wait(self._sums.empty_s(layer), "d2h")

    def complete(self, visit: Visit) -> None:
        """Simulate what happens to the sum after the visit: a sum over GPUs, then it leaves or stays on the device."""
        layer = visit.layer
        if visit.last and self._plan.hosts.num_gpus > 1:
            op = Op(SUM_OVER_GPUS, layer, num_bytes=self._bytes(layer, self._plan.gradients.accumulate_dtype))
            self._clocks.run(Stage.COMPUTE, op)
        if visit.last and layer in self._waiting:
            if not self._stays(layer):
                self._with_region.discard(layer)
                self._sums.release(layer, self._clocks.computed_s)
        elif visit.last:
            self._finish(layer)
        elif self._plan.gradients.sums is Tier.HOST:
            self._sums.release(layer, self._offload(layer, self._plan.gradients.accumulate_dtype))

    def reload(self, layer: int, after_s: float) -> None:
        """Reload a gradient, make its directions and offload them: Muon with clipping.

        after_s: when the momentum may be uploaded.
        """
        arrived_s = self._fetch(layer, self._plan.gradients.offload_dtype)
        self._directions.fetch_momentum(layer, after_s)
        self._clocks.wait(arrived_s, "h2d")
        self._directions.orthogonalize(layer)
        self._sums.release(layer, self._clocks.computed_s)
        self.landed_s[layer] = self._directions.offload(layer)

    def offload_deferred(self, layer: int, after_s: float) -> float:
        """Offload a gradient that waited on the device, and return when it is on the host (s)."""
        op = Op(
            "offload",
            layer,
            num_bytes=self._bytes(layer, self._plan.gradients.offload_dtype) // self._plan.hosts.num_gpus,
        )
        return self._clocks.run(Stage.D2H, op, after_s, self._slab.allocate(layer))

    def updated(self, layer: int, at_s: float) -> None:
        """Release the layer's gradient from the slab: its update is over, so nobody reads it any more."""
        if layer in self._waiting:
            self._slab.release(layer, at_s)

    def _stays(self, layer: int) -> bool:
        """Return whether the layer's gradient is on the device from its first contribution to its update."""
        return layer in self._waiting and self._plan.gradients.sums is Tier.HBM

    def _orthogonalizes_at_once(self, layer: int) -> bool:
        """Return whether Muon's directions are made as soon as the gradient is complete."""
        return layer in self._layout.with_muon and self._plan.step.update_order is UpdateOrder.BACKWARD

    def _finish(self, layer: int) -> None:
        rounded = bool(self._plan.slots.rounded_bytes)
        if rounded:
            self._clocks.wait(self._rounded.empty_s(layer), "d2h")
            self._sums.release(layer, self._clocks.computed_s)
        directed = self._orthogonalizes_at_once(layer)
        if directed:
            self._directions.orthogonalize(layer)
        stored_s = self._offload(layer, self._plan.gradients.offload_dtype)
        (self._rounded if rounded else self._sums).release(layer, stored_s)
        self.landed_s[layer] = self._directions.offload(layer) if directed else stored_s

    def _offload(self, layer: int, dtype: torch.dtype) -> float:
        """Offload the layer's gradient, and return when it is on the host (s)."""
        self._with_region.discard(layer)
        op = Op("offload", layer, num_bytes=self._bytes(layer, dtype) // self._plan.hosts.num_gpus)
        room_s = self._slab.allocate(layer) if layer in self._stored else 0.0
        self._stored_s[layer] = self._clocks.run(Stage.D2H, op, self._clocks.computed_s, room_s)
        if layer in self._stored:
            self._slab.release(layer, self._spill.store(layer, self._stored_s[layer]))
        return self._stored_s[layer]

    def _fetch(self, layer: int, dtype: torch.dtype) -> float:
        """Reload the layer's gradient, and return when it is on the device (s)."""
        op = Op("fetch", layer, num_bytes=self._bytes(layer, dtype) // self._plan.hosts.num_gpus)
        return self._clocks.run(Stage.H2D, op, self._stored_s[layer], self._sums.empty_s(layer))

    def _bytes(self, layer: int, dtype: torch.dtype) -> int:
        return self._layout.layers[layer].trained.size * dtype.itemsize
