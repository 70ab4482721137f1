"""Simulates the schedule of a step on a clock for each stage, without running it.

The times are those of the engine on the virtual clock (megatrain_ray/virtual_clock.py). What the streamer, the gradient
slots, the offloader and the shards wait for is repeated here in a few lines each;
tests/engine/planner/cost/test_simulation.py compares both.

This module simulates visits, loads and updates. Other modules submit to the same clocks: simulate_gradients.py,
simulate_activations.py, and simulated_buffers.py for what is on disk and for Muon's directions.

Without clipping the room in the slab is not simulated. A full slab can then hold up a backward, but otherwise the next
forward would wait as long, so a step takes as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.activation_moves import RETURNING
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.plan_groups import UpdateOrder
from megatrain_ray.engine.plan.residency import FragmentId, Residency
from megatrain_ray.engine.plan.schedule import Phase, Visit
from megatrain_ray.engine.planner.cost.simulate_activations import SimulatedActivations
from megatrain_ray.engine.planner.cost.simulate_gradients import SimulatedGradients
from megatrain_ray.engine.planner.cost.simulated_buffers import SimulatedSpill, SimulatedUploadBuffers
from megatrain_ray.engine.planner.cost.stage_clocks import Clocks
from megatrain_ray.virtual_clock import CostModel, Op, Stage


@dataclass(frozen=True)
class SimulatedStep:
    """Holds the seconds of a simulated step, and the bytes that it moved.

    step_s: of the whole step.
    compute_s: of the compute stream at work, by operation.
    exposed_s: of the compute stream waiting, by cause.
    busy_s: of each stage at work.
    num_bytes: bytes that each stage moved.
    """

    step_s: float
    compute_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    busy_s: Mapping[Stage, float]
    num_bytes: Mapping[Stage, int]


class _Arrival(NamedTuple):
    generation_s: float  # when the layer's working copy was in host memory
    end_s: float


class Simulation:
    """Simulates steps of one plan one after the other: `step()` runs the next one. The second is the steady state."""

    def __init__(
        self, plan: Plan, layout: ModelLayout, visits: tuple[Visit, ...], residency: Residency, cost: CostModel
    ) -> None:
        """Prepare the first step.

        visits: of a step.
        residency: what is in the slots during each visit.
        cost: seconds of an operation, the same for every micro-batch.
        """
        self._plan = plan
        self._layout = layout
        self._visits = visits
        self._residency = residency
        self._clocks = Clocks(cost)
        self._activations = SimulatedActivations(plan, visits, self._clocks)
        self._spill = SimulatedSpill(plan, layout, self._clocks.run)
        self._upload_buffers = SimulatedUploadBuffers(plan, layout, self._clocks.run)
        self._gradients = SimulatedGradients(plan, layout, self._clocks, self._spill)
        self._on_device = plan.hbm_layers
        self._by_gpu = {i for i, layer in enumerate(plan.layers) if layer.updated_by == "gpu"}
        self._gradients_on_device = plan.gradients_on_device
        self._generation_s = [0.0] * len(plan.layers)
        self._moved_s = 0.0  # when the step's own gradients and directions had left the device

    def step(self) -> SimulatedStep:
        self._begin()
        self._load()
        for visit in self._visits:
            self._visit(visit)
        self._update()
        clocks = self._clocks
        clocks.wait(self._moved_s, "d2h")
        step_s = clocks.computed_s - self._start_s
        return SimulatedStep(step_s, clocks.compute_s, clocks.exposed_s, clocks.busy_s, clocks.num_bytes)

    def _begin(self) -> None:
        """Begin a step at the time when the step before has computed and its gradients have landed."""
        for part in (self._clocks, self._activations, self._gradients):
            part.begin()
        self._start_s = self._clocks.computed_s
        self._released_s: list[float] = []  # when each visit had ended
        self._arrivals: dict[FragmentId, _Arrival] = {}
        self._num_loads = 0

    def _load(self) -> None:
        """Submit every load whose slot has been released."""
        loads = self._residency.loads
        while self._num_loads < len(loads) and loads[self._num_loads].after_visit < len(self._released_s):
            load = loads[self._num_loads]
            self._num_loads += 1
            layer = load.fragment.layer
            if layer in self._on_device:
                continue
            span = self._layout.layers[layer].fragments[load.fragment.index]
            num_bytes = span.size * self._plan.precision.working_dtype.itemsize
            op = Op("load", layer, fragment=load.fragment.index, num_bytes=num_bytes)
            free_s = self._released_s[load.after_visit] if load.after_visit >= 0 else self._start_s
            generation_s = self._upload_buffers.read(load.fragment, self._generation_s[layer], self._start_s)
            end_s = self._fill(op, self._start_s, free_s, generation_s)
            self._upload_buffers.release(load.fragment, end_s)
            self._arrivals[load.fragment] = _Arrival(generation_s, end_s)

    def _fill(self, op: Op, *after_s: float) -> float:
        """Fill a slot, and return when it is full (s).

        With several GPUs that gather slots this is an upload of this GPU's part, followed by an all-gather. Else it is
        a full upload.

        after_s: times before which the upload cannot begin.
        """
        if not self._plan.slots.gathered:
            return self._clocks.run(Stage.H2D, op, *after_s)
        own = replace(op, num_bytes=op.num_bytes // self._plan.hosts.num_gpus)
        loaded_s = self._clocks.run(Stage.H2D, own, *after_s)
        return self._clocks.run(Stage.ALL_GATHER, Op("all-gather", op.layer, num_bytes=op.num_bytes), loaded_s)

    def _visit(self, visit: Visit) -> None:
        if visit.index + 1 < len(self._visits):
            self._gradients.prefetch_sum(self._visits[visit.index + 1])
        for fragment in self._residency.slots[visit.index]:
            if fragment.layer not in self._on_device:
                arrival = self._arrivals[fragment]
                self._clocks.wait(arrival.generation_s, "optimizer")
                self._clocks.wait(arrival.end_s, "h2d")
        self._gradients.prefetch_momentum(visit, self._momentum_s(visit.layer))
        count = len(visit.micro_batches)
        if self._gradients.adds_gradient(visit):
            if visit.phase is Phase.HEAD and self._plan.compute.chunks_add_to_sums:
                self._gradients.wait_for_region(visit.layer)
            num_added = 2 if visit.layer in self._plan.paired_layers else 1  # micro-batches at a time
            self._compute(visit, num_added)
            self._gradients.wait_for_region(visit.layer)
            self._compute(visit, count - num_added)
            self._complete(visit)
        else:
            self._compute(visit, count)
        self._released_s.append(self._clocks.computed_s)
        self._load()

    def _compute(self, visit: Visit, count: int) -> None:
        """Compute `count` micro-batches of a visit, one after the other.

        They wait between each other only for activations that are offloaded or reloaded for each of them.
        """
        moves = self._activations.moves(visit)
        for _ in range(count if moves else min(count, 1)):
            if moves and visit.phase in RETURNING:
                self._activations.reload()
            for name in operations(visit.phase, self._plan.layers[visit.layer].activations):
                self._clocks.run(Stage.COMPUTE, Op(name, visit.layer), count=1 if moves else count)
            if moves and visit.phase is Phase.FORWARD:
                self._activations.offload(visit.layer)

    def _complete(self, visit: Visit) -> None:
        self._gradients.complete(visit)
        if visit.last and visit.layer in self._by_gpu and self._plan.step.update_order is UpdateOrder.BACKWARD:
            self._clocks.run(Stage.COMPUTE, Op("update", visit.layer))

    def _momentum_s(self, layer: int) -> float:
        """Return the time from which on the layer's momentum may be uploaded (s)."""
        return max(self._generation_s[layer], self._start_s)

    def _update(self) -> None:
        """Run the updates: those of the shards, and with clipping those of the GPU.

        With clipping all updates run after the end of the backward, where the scale is known.
        """
        committed_s = 0.0
        if self._plan.step.update_order is UpdateOrder.FORWARD:
            committed_s = self._clocks.computed_s
            for layer in sorted(self._by_gpu):
                self._clocks.run(Stage.COMPUTE, Op("update", layer))
            for layer in self._layout.with_muon:
                self._gradients.reload(layer, self._momentum_s(layer))
        self._moved_s = self._clocks.end_s[Stage.D2H]
        for layer in self._plan.layer_order:
            waited = layer in self._gradients_on_device
            landed_s = (
                self._gradients.offload_deferred(layer, committed_s) if waited else self._gradients.landed_s[layer]
            )
            op = Op("update", layer)
            there_s = self._spill.load(layer, max(committed_s, landed_s))
            updated_s = self._clocks.run(Stage.OPTIMIZER, op, committed_s, landed_s, there_s)
            self._generation_s[layer] = self._spill.write_back(layer, updated_s)
            self._gradients.updated(layer, updated_s)


def operations(phase: Phase, policy: ActivationPolicy) -> tuple[str, ...]:
    """Return the names of the operations that compute one micro-batch in a visit of a layer."""
    match phase:
        case Phase.FORWARD:
            return ("forward",)
        case Phase.REPLAY:
            return ("replay",)
        case Phase.HEAD:
            return ("forward", "loss", "backward")
    return ("recompute", "backward") if policy is ActivationPolicy.RECOMPUTE else ("backward",)
