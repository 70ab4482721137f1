"""The schedule of a step on four clocks, as the engine runs it on the virtual clock (trace.py), without running it.

What the streamer, the gradient slots, the offloader and the shards wait for is said here once more, in a few lines
each; tests/test_simulation.py holds the two together. Not simulated: the room in the slab. Without clipping it can hold
a backward up that the next forward would otherwise wait for, and a step takes as long.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from megatrain_ray.engine.gradient_regions import regions_of
from megatrain_ray.engine.layout import DIRECTION_BYTES, ModelLayout
from megatrain_ray.engine.plan import ActivationPolicy, Plan, Tier, UpdateOrder
from megatrain_ray.engine.residency import FragmentId, Residency
from megatrain_ray.engine.visits import Phase, Visit
from megatrain_ray.trace import CostModel, Op, Stage


@dataclass(frozen=True)
class SimulatedStep:
    """Seconds of a step: of all of it, of the compute stage by operation, of its waits by cause, of each stage at work;
    and what each stage moved."""

    step_s: float
    compute_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    busy_s: Mapping[Stage, float]
    num_bytes: Mapping[Stage, int]


class _Arrival(NamedTuple):
    generation_s: float  # when the layer's working copy was there
    end_s: float


@dataclass
class _Ring:
    """Regions that layers take in turn, and when each of them is empty."""

    index: Mapping[int, int]
    empty_s: dict[int, float] = field(default_factory=dict)

    def empty(self, layer: int) -> float:
        return self.empty_s.get(self.index[layer], 0.0)

    def leave(self, layer: int, at_s: float) -> None:
        self.empty_s[self.index[layer]] = at_s


class Simulation:
    """Steps of one plan one after the other: `step()` gives the next one. The second is the steady state."""

    def __init__(
        self, plan: Plan, layout: ModelLayout, visits: tuple[Visit, ...], residency: Residency, cost: CostModel
    ) -> None:
        """`cost`: seconds of an operation, the same for every micro-batch."""
        self._plan = plan
        self._layout = layout
        self._visits = visits
        self._residency = residency
        self._cost = cost
        self._on_device = {i for i, layer in enumerate(plan.layers) if layer.weights is Tier.HBM}
        self._by_gpu = {i for i, layer in enumerate(plan.layers) if layer.updated_by == "gpu"}
        self._waiting = plan.waiting_layers
        self._end = dict.fromkeys(Stage, 0.0)
        self._generation_s = [0.0] * len(plan.layers)
        self._host_boundaries = [x.boundary_bytes if x.boundary is Tier.HOST else 0 for x in plan.layers]
        self._moved_s = 0.0  # when the step's own gradients and directions had left
        self._begin()

    def _begin(self) -> None:
        """A step begins when the one before has computed and its gradients have landed."""
        updated = tuple(reversed(self._layout.updated))
        leaving = tuple(layer for layer in updated if layer not in self._waiting)
        muon = tuple(reversed(self._layout.with_muon))
        plan = self._plan
        of_sums = leaving if plan.sums is Tier.HBM else updated
        self._sums = self._ring(of_sums, plan.gradient_slot_bytes, plan.accumulation_dtype.itemsize)
        self._leaving = self._ring(leaving, plan.leaving_slot_bytes, plan.wire_dtype.itemsize)
        self._momenta = self._ring(muon, plan.momentum_slot_bytes, torch.float32.itemsize)
        self._directions = self._ring(muon, plan.direction_slot_bytes, DIRECTION_BYTES)
        self._open: set[int] = set()
        self._stored_s: dict[int, float] = {}  # when a layer's gradient was on the host
        self._landed_s: dict[int, float] = {}
        self._fetched_s: dict[int, float] = {}
        self._momentum_s: dict[int, float] = {}
        self._boundary_out_s = 0.0
        self._boundaries_back_s: list[float] = []  # in the order of the backward
        self._num_left, self._num_backwards = 0, 0  # so far
        self._released_s: list[float] = []
        self._arrivals: dict[FragmentId, _Arrival] = {}
        self._num_loads = 0
        self._compute_s: dict[str, float] = defaultdict(float)
        self._exposed_s: dict[str, float] = defaultdict(float)
        self._busy_s: dict[Stage, float] = defaultdict(float)
        self._num_bytes: dict[Stage, int] = defaultdict(int)

    def _ring(self, layers: Sequence[int], sizes: Sequence[int], itemsize: int) -> _Ring:
        needed = [self._layout.layers[layer].trained.size * itemsize for layer in layers]
        return _Ring(regions_of(layers, needed, sizes) if sizes else {})

    def step(self) -> SimulatedStep:
        self._begin()
        start_s = self._start_s = self._end[Stage.COMPUTE]
        self._load()
        for visit in self._visits:
            self._visit(visit)
        self._update()
        self._wait(self._moved_s, "d2h")
        return SimulatedStep(
            self._end[Stage.COMPUTE] - start_s, self._compute_s, self._exposed_s, self._busy_s, self._num_bytes
        )

    def _run(self, stage: Stage, op: Op, *after_s: float, count: int = 1) -> float:
        """When the operation, `count` times, ends."""
        seconds = self._cost(stage, op) * count
        self._end[stage] = max(self._end[stage], *after_s, 0.0) + seconds
        self._busy_s[stage] += seconds
        self._num_bytes[stage] += op.num_bytes
        if stage is Stage.COMPUTE:
            self._compute_s[op.name] += seconds
        return self._end[stage]

    def _wait(self, until_s: float, cause: str) -> None:
        """The compute stage stands still."""
        late_s = until_s - self._end[Stage.COMPUTE]
        if late_s > 0:
            self._exposed_s[cause] += late_s
            self._end[Stage.COMPUTE] = until_s

    def _load(self) -> None:
        """Submits every load whose slot has been let go of."""
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
            generation_s = self._generation_s[layer]
            end_s = self._run(Stage.H2D, op, self._start_s, free_s, generation_s)
            self._arrivals[load.fragment] = _Arrival(generation_s, end_s)

    def _visit(self, visit: Visit) -> None:
        self._fetch_ahead(visit.index + 1)
        for fragment in self._residency.slots[visit.index]:
            if fragment.layer not in self._on_device:
                arrival = self._arrivals[fragment]
                self._wait(arrival.generation_s, "optimizer")
                self._wait(arrival.end_s, "h2d")
        expects = visit.last and visit.layer in self._layout.with_muon
        if expects and self._plan.update_order is UpdateOrder.BACKWARD:
            self._fetch_momentum(visit.layer)
        count = len(visit.micro_batches)
        if self._has_gradient(visit):
            if visit.phase is Phase.HEAD and self._plan.chunks_add_to_sums:
                self._open_sum(visit)
            self._compute(visit, 1)
            self._open_sum(visit)
            self._compute(visit, count - 1)
            self._complete(visit)
        else:
            self._compute(visit, count)
        self._released_s.append(self._end[Stage.COMPUTE])
        self._load()

    def _compute(self, visit: Visit, count: int) -> None:
        """Micro-batches one after the other: but for what comes and goes with each nothing waits between them."""
        moves = bool(self._host_boundaries[visit.layer])
        for _ in range(count if moves else min(count, 1)):
            if moves and visit.phase is Phase.BACKWARD:
                self._bring_back()
            for name in operations(visit.phase, self._plan.layers[visit.layer].activations):
                self._run(Stage.COMPUTE, Op(name, visit.layer), count=1 if moves else count)
            if moves and visit.phase is Phase.FORWARD:
                self._move_boundary(visit.layer)

    def _move_boundary(self, layer: int) -> None:
        """What entered leaves behind its forward, and frees its memory behind the next one's."""
        before_s = self._boundary_out_s
        op = Op("boundary", layer, num_bytes=self._host_boundaries[layer])
        self._boundary_out_s = self._run(Stage.D2H, op, self._end[Stage.COMPUTE])
        self._wait(before_s, "d2h")
        self._num_left += 1

    def _bring_back(self) -> None:
        """What the next backward needs is on its way, too, where it has left already."""
        self._wait(self._boundary_out_s, "d2h")
        this, order = self._num_backwards, self._boundary_order
        for layer in order[len(self._boundaries_back_s) : min(this + 2, self._num_left)]:
            op = Op("boundary", layer, num_bytes=self._host_boundaries[layer])
            self._boundaries_back_s.append(self._run(Stage.H2D, op, self._end[Stage.COMPUTE]))
        self._wait(self._boundaries_back_s[this], "h2d")
        self._num_backwards += 1

    @cached_property
    def _boundary_order(self) -> list[int]:
        """Layers of all that comes back in a step, one by one."""
        moving = (v for v in self._visits if v.phase is Phase.BACKWARD and self._host_boundaries[v.layer])
        return [visit.layer for visit in moving for _ in visit.micro_batches]

    def _has_gradient(self, visit: Visit) -> bool:
        return visit.phase is not Phase.FORWARD and self._layout.layers[visit.layer].trained.size > 0

    def _fetch_ahead(self, index: int) -> None:
        """Asks for the sum that the visit will add to."""
        if self._plan.sums is not Tier.HOST or index == len(self._visits):
            return
        visit = self._visits[index]
        if self._has_gradient(visit) and visit.micro_batches[0] > 0:
            op = Op("fetch", visit.layer, num_bytes=self._gradient_bytes(visit.layer, self._plan.accumulation_dtype))
            after_s = self._stored_s[visit.layer], self._sums.empty(visit.layer)
            self._fetched_s[visit.layer] = self._run(Stage.H2D, op, *after_s)

    def _open_sum(self, visit: Visit) -> None:
        """Where the sum is, or begins to be; of a layer whose gradient waits on the device at a place of its own,
        unless unfinished sums wait on the host."""
        if visit.layer in self._open or self._stays(visit.layer):
            return
        self._open.add(visit.layer)
        if visit.layer in self._fetched_s:
            self._wait(self._fetched_s.pop(visit.layer), "host_accumulation")
        else:
            self._wait(self._sums.empty(visit.layer), "d2h")

    def _complete(self, visit: Visit) -> None:
        """What happens to the sum after the visit."""
        layer = visit.layer
        if visit.last and layer in self._waiting:
            if not self._stays(layer):
                self._open.discard(layer)
                self._sums.leave(layer, self._end[Stage.COMPUTE])
            if layer in self._by_gpu and self._plan.update_order is UpdateOrder.BACKWARD:
                self._run(Stage.COMPUTE, Op("update", layer))
        elif visit.last:
            self._finish(layer)
        elif self._plan.sums is Tier.HOST:
            self._sums.leave(layer, self._depart(layer, self._plan.accumulation_dtype))

    def _stays(self, layer: int) -> bool:
        """Whether the layer's gradient is on the device from its first contribution to its update."""
        return layer in self._waiting and self._plan.sums is Tier.HBM

    def _finish(self, layer: int) -> None:
        rounded = bool(self._plan.leaving_slot_bytes)
        if rounded:
            self._wait(self._leaving.empty(layer), "d2h")
            self._sums.leave(layer, self._end[Stage.COMPUTE])
        has_muon = layer in self._layout.with_muon
        directed = has_muon and self._plan.update_order is UpdateOrder.BACKWARD
        if directed:
            self._orthogonalize(layer)
        stored_s = self._depart(layer, self._plan.wire_dtype)
        (self._leaving if rounded else self._sums).leave(layer, stored_s)
        self._landed_s[layer] = self._complete_directions(layer) if directed else stored_s

    def _depart(self, layer: int, dtype: torch.dtype) -> float:
        """The gradient leaves for the host."""
        self._open.discard(layer)
        op = Op("offload", layer, num_bytes=self._gradient_bytes(layer, dtype))
        self._stored_s[layer] = self._run(Stage.D2H, op, self._end[Stage.COMPUTE])
        return self._stored_s[layer]

    def _gradient_bytes(self, layer: int, dtype: torch.dtype) -> int:
        return self._layout.layers[layer].trained.size * dtype.itemsize

    def _update(self) -> None:
        """With clipping everything follows the end of the backward, where the scale is known."""
        committed_s = 0.0
        if self._plan.update_order is UpdateOrder.FORWARD:
            committed_s = self._end[Stage.COMPUTE]
            for layer in sorted(self._by_gpu):
                self._run(Stage.COMPUTE, Op("update", layer))
            for layer in self._layout.with_muon:
                self._recall(layer)
        self._moved_s = self._end[Stage.D2H]
        staged: deque[int] = deque()  # layers whose gradients are in the slab, beside the next forward
        for layer in self._plan.layer_order:
            if layer in self._waiting:
                self._landed_s[layer] = self._leave_late(layer, staged, committed_s)
            after_s = committed_s, self._landed_s[layer]
            self._generation_s[layer] = self._run(Stage.OPTIMIZER, Op("update", layer), *after_s)

    def _leave_late(self, layer: int, staged: deque[int], committed_s: float) -> float:
        """A gradient that waited on the device leaves when the slab has room. Counted as the step's that made it."""
        sizes = {i: self._gradient_bytes(i, self._plan.wire_dtype) for i in (*staged, layer)}
        room_s = committed_s
        while sum(sizes[i] for i in (*staged, layer)) > self._plan.slab_bytes:
            room_s = self._generation_s[staged.popleft()]
        staged.append(layer)
        return self._run(Stage.D2H, Op("offload", layer, num_bytes=sizes[layer]), room_s)

    def _recall(self, layer: int) -> None:
        """Muon with clipping: the gradient comes back, its directions leave."""
        op = Op("fetch", layer, num_bytes=self._gradient_bytes(layer, self._plan.wire_dtype))
        arrived_s = self._run(Stage.H2D, op, self._stored_s[layer], self._sums.empty(layer))
        self._fetch_momentum(layer)
        self._wait(arrived_s, "h2d")
        self._orthogonalize(layer)
        self._sums.leave(layer, self._end[Stage.COMPUTE])
        self._landed_s[layer] = self._complete_directions(layer)

    def _fetch_momentum(self, layer: int) -> None:
        op = Op("momentum", layer, num_bytes=self._gradient_bytes(layer, torch.float32))
        after_s = self._momenta.empty(layer), self._generation_s[layer], self._start_s
        self._momentum_s[layer] = self._run(Stage.H2D, op, *after_s)

    def _orthogonalize(self, layer: int) -> None:
        self._wait(self._momentum_s.pop(layer), "h2d")
        self._wait(self._directions.empty(layer), "d2h")
        self._momenta.leave(layer, self._run(Stage.COMPUTE, Op("orthogonalize", layer)))

    def _complete_directions(self, layer: int) -> float:
        op = Op("complete", layer, num_bytes=self._layout.layers[layer].trained.size * DIRECTION_BYTES)
        end_s = self._run(Stage.D2H, op, self._end[Stage.COMPUTE])
        self._directions.leave(layer, end_s)
        return end_s


def operations(phase: Phase, policy: ActivationPolicy) -> tuple[str, ...]:
    """Of a layer for one micro-batch."""
    match phase:
        case Phase.FORWARD:
            return ("forward",)
        case Phase.HEAD:
            return ("forward", "loss", "backward")
    return ("recompute", "backward") if policy is ActivationPolicy.RECOMPUTE else ("backward",)
