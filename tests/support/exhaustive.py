"""Finds the fastest plan of a small model by trying all that a plan can say and the engine can run.

`make_plan` tries few of these plans, and is compared with the fastest. Tried are all combinations of:

- every split into micro-batches, and both loop orders;
- MLPs in chunks where sequences are long;
- every set of layers on the device, or as many of the first ones as are asked for;
- every number of slots;
- what each block keeps for its backward;
- where sums, gradients, inputs of blocks and the activations that blocks keep wait;
- every length of a segment;
- every set of gradients, state, working copies and activations on disk that is just enough for the host.

More on disk than that never makes a step faster. Only plans that cannot be faster than asked are not simulated; that
the bounds for this hold is shown by tests/engine/planner/search/test_plan_bounds.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.flops import work_of
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.activation_staging import with_staging_buffers
from megatrain_ray.engine.plan.plan import ActivationPolicy, LayerPlan, Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.predict_step import predict
from megatrain_ray.engine.planner.limits import fits, spare_ram
from megatrain_ray.engine.planner.memory.chunk_sizes import is_long, may_chunk, mlp_chunk_tokens
from megatrain_ray.engine.planner.memory.device_bytes import device_memory_items, resident_bytes
from megatrain_ray.engine.planner.memory.host_bytes import disk_memory_items, host_memory_items
from megatrain_ray.engine.planner.memory.plan_builder import PlanBuilder
from megatrain_ray.engine.planner.memory.spill_bytes import with_spilled
from megatrain_ray.engine.planner.memory.spill_choice import LayersOnDisk
from megatrain_ray.engine.planner.memory.work_bytes import kept_bytes
from megatrain_ray.engine.planner.request import Candidate, Machine, Request
from megatrain_ray.engine.planner.search.fill_device import FILLED_SHARE
from megatrain_ray.engine.planner.search.lower_bounds import Bounds
from tests.support.exhaustive_disk import DiskChoices, on_disk_of, subsets

# Rows of device memory that may need less the more layers live on the device.
SHRINKING = ("slots", "gradient slots", "gradients in HBM")
# For each block: what it does with activations, its budget if compiled, and where the kept ones wait.
Keeps = tuple[tuple[ActivationPolicy, float, Tier], ...]


@dataclass(frozen=True)
class Exhaustive:
    """Searches through all plans of a model on a machine.

    A plan may take FILLED_SHARE of the device's memory, which is what `make_plan` allows for things that need not be
    there.

    request: asks for micro-batches of one sequence; with a free split they may be larger.
    """

    structure: ModelStructure
    activations: ActivationBytes
    machine: Machine
    request: Request

    def faster_than(self, limit_s: float) -> Plan | None:
        """Return the fastest plan that fits and takes less than `limit_s`; None if there is none."""
        best: Plan | None = None
        for search in self._splits():
            for plan in search.plans(limit_s):
                assert plan.prediction is not None
                if plan.prediction.step_s < limit_s:
                    best, limit_s = plan, plan.prediction.step_s
                    search.limit_s = limit_s
        return best

    def _splits(self) -> Iterator[_Split]:
        count = self.request.num_micro_batches
        for size in (n for n in range(1, count + 1) if count % n == 0 and (n == 1 or self.request.free_split)):
            split = replace(self.request, micro_batch_size=size, num_micro_batches=count // size, free_split=False)
            activations = self.activations.times(size)
            yield _Split(self.structure, activations, self._machine, split)
            tokens = size * split.seq_len
            if not may_chunk(tokens, split.seq_len, has_disk=self.machine.spill is not None):
                continue
            chunk_tokens = mlp_chunk_tokens(self.structure, tokens)
            if chunk_tokens and (in_chunks := activations.in_chunks()):
                yield _Split(self.structure, in_chunks, self._machine, replace(split, mlp_chunk_tokens=chunk_tokens))

    @property
    def _machine(self) -> Machine:
        assert self.machine.hbm_bytes is not None
        return replace(self.machine, hbm_bytes=int(FILLED_SHARE * self.machine.hbm_bytes))


class _Split:
    """Enumerates all plans of one split into micro-batches."""

    def __init__(
        self, structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request
    ) -> None:
        self.limit_s = 0.0
        self.num_simulated = 0
        self._structure = structure
        self._activations = activations
        self._machine = machine
        self._request = request
        self._layout = structure.layout()
        work, rates = work_of(structure), machine.rates
        disk = machine.spill.bytes_per_s if machine.spill else float("inf")
        self._basis = CostBasis(structure, self._layout, work, rates, True, request.objective.per_logit, disk)
        # Nothing spills unless `_on_disk` says so.
        self._known_moving_s: dict[object, float] = {}
        self._known_choices: dict[object, list[tuple[int, LayersOnDisk]]] = {}
        self._builder = PlanBuilder(structure, self._layout, activations, replace(machine, spill=None), request)

    def plans(self, limit_s: float) -> Iterator[Plan]:
        """Yield the plans that fit, with predictions, but not those that take `limit_s` or longer in any case."""
        self.limit_s = limit_s
        for way, keeps in itertools.product(self._ways(), self._keeps()):
            plan = self._with(way, keeps)
            if self._room(plan) < 0 or self._least_s(plan) >= self.limit_s:
                continue
            sets = self._sets_within(self._room(plan))
            for layers, slots in itertools.product(sets, self._slots()):
                candidate = way._replace(hbm_layers=layers, num_block_slots=slots[0], num_edge_slots=slots[1])
                if self._least_moving_s(candidate, keeps) >= self.limit_s:
                    continue
                plan = self._with(candidate, keeps)
                if plan.total_bytes(Tier.HBM) > (plan.limits.hbm_bytes or 0):
                    continue
                for whole in self._on_disk(plan):
                    if fits(whole) and self._least_s(whole) < self.limit_s:
                        self.num_simulated += 1
                        yield replace(whole, prediction=predict(whole, self._basis, self._activations))

    def _least_moving_s(self, candidate: Candidate, keeps: Keeps) -> float:
        """Return the least seconds to write to disk and read back what the host has no room for.

        Slots, and what is kept on the device, make no difference to it.
        """
        away_from = tuple(kept if kept[2] is Tier.HOST else None for kept in keeps)
        key = candidate._replace(num_block_slots=1, num_edge_slots=1), away_from
        if key not in self._known_moving_s:
            missing, spill = -spare_ram(self._with(key[0], keeps)), self._machine.spill
            rate = spill.bytes_per_s if spill else 0.0
            self._known_moving_s[key] = 0.0 if missing <= 0 else 2 * missing / rate if rate else math.inf
        return self._known_moving_s[key]

    def _room(self, plan: Plan) -> int:
        """Return the bytes that layers may take on the device, however small slots are. `plan`: has no layers there."""
        rest = (row for row in plan.memory_items if row.tier is Tier.HBM and row.name not in SHRINKING)
        return (plan.limits.hbm_bytes or 0) - sum(row.num_bytes for row in rest)

    def _sets_within(self, room: int) -> list[frozenset[int]]:
        if self._request.hbm_layers is not None:
            return [frozenset(range(self._request.hbm_layers))]
        sizes = [resident_bytes(self._request.precision, layer) for layer in self._layout.layers]
        return [layers for layers in subsets(range(self._num_layers)) if sum(sizes[i] for i in layers) <= room]

    def _ways(self) -> Iterator[Candidate]:
        """Yield candidates that differ in everything except layers on the device, slots, and what blocks keep."""
        several = self._request.num_micro_batches > 1
        orders = list(LoopOrder) if several else [LoopOrder.MICRO_BATCHES_OUTER]
        tiers = Tier.HBM, Tier.HOST
        segments = range(1, self._num_blocks + 1)
        for order, sums, gradients, boundaries, segment in itertools.product(orders, tiers, tiers, tiers, segments):
            if sums is Tier.HOST and (order is LoopOrder.LAYERS_OUTER or not several):
                continue  # there are none
            yield Candidate(
                order, ActivationPolicy.KEEP, 1, 1,
                sums=sums, gradients=gradients, boundaries=boundaries, segment=segment,
            )  # fmt: skip

    def _keeps(self) -> Iterator[Keeps]:
        whole, nothing = (ActivationPolicy.KEEP, 1.0, Tier.HBM), (ActivationPolicy.RECOMPUTE, 1.0, Tier.HBM)
        of_block = [(ActivationPolicy.KEEP, x.activation_budget, Tier.HBM) for x in self._activations.budgets_of(1)]
        of_block = of_block or [whole, nothing]
        if is_long(self._request.seq_len):
            of_block += [
                (policy, budget, Tier.HOST) for policy, budget, _ in of_block if (policy, budget) != nothing[:2]
            ]
        return itertools.product(of_block, repeat=self._num_blocks)

    def _slots(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(1, self._num_blocks + 1), (1, 2))

    def _with(self, candidate: Candidate, keeps: Keeps) -> Plan:
        """Return the candidate's plan in which each block keeps what `keeps` says."""
        smallest = min(keeps, key=lambda kept: (kept[0] is ActivationPolicy.KEEP, kept[1]))
        plan = self._builder.in_memory(candidate._replace(activations=smallest[0], activation_budget=smallest[1]))
        blocks = (
            self._kept_at(i, replace(layer, activations=policy, activation_budget=budget), tier)
            for i, (layer, (policy, budget, tier)) in enumerate(zip(plan.layers[1:-1], keeps, strict=True), start=1)
        )
        return self._counted(replace(plan, layers=(plan.layers[0], *blocks, plan.layers[-1])))

    def _kept_at(self, index: int, layer: LayerPlan, tier: Tier) -> LayerPlan:
        if tier is Tier.HBM:
            return layer
        return replace(layer, kept=tier, kept_bytes=kept_bytes(self._activations, index, layer))

    def _counted(self, plan: Plan) -> Plan:
        """Return the plan with its rows of memory counted anew."""
        hbm = device_memory_items(plan, self._structure, self._layout, self._activations, self._request.objective)
        spill = self._machine.spill
        plan = replace(plan, limits=replace(plan.limits, spill_bytes=spill.limit_bytes if spill else None))
        return replace(
            plan, memory_items=(*hbm, *host_memory_items(plan, self._layout), *disk_memory_items(plan, self._layout))
        )

    def _on_disk(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plan; if the host has no room for it, also plans with enough on disk, the fewest bytes first."""
        yield plan
        if self._machine.spill is None or fits(plan):
            return
        for num_bytes, on_disk in self._choices(plan):
            if 2 * num_bytes / self._machine.spill.bytes_per_s >= self.limit_s:
                return
            layers = tuple(on_disk_of(layer, i, on_disk) for i, layer in enumerate(plan.layers))
            on_disk_too = replace(plan, layers=layers)
            if on_disk.of_shards:
                on_disk_too = with_spilled(plan, layers, self._layout)
            yield self._counted(with_staging_buffers(on_disk_too))

    def _choices(self, plan: Plan) -> list[tuple[int, LayersOnDisk]]:
        """Return all sets of things on disk that are just enough, with their bytes, the fewest first.

        Slots, and what is kept on the device, make no difference.
        """
        away_from = tuple((layer.boundary, layer.kept, layer.kept_bytes) for layer in plan.layers)
        key = plan.hbm_layers, plan.gradients.sums, plan.gradients_on_device, plan.step.order, away_from
        if key not in self._known_choices:
            missing = -spare_ram(plan)
            self._known_choices[key] = DiskChoices(plan, self._structure, self._layout, missing).fewest()
        return self._known_choices[key]

    def _least_s(self, plan: Plan) -> float:
        bounds = Bounds(plan, self._basis, self._activations)
        return max(bounds.compute_s, bounds.update_s, bounds.chained_s, bounds.h2d_s, bounds.disk_s)

    @cached_property
    def _num_layers(self) -> int:
        return len(self._structure.layers)

    @cached_property
    def _num_blocks(self) -> int:
        return self._num_layers - 2
