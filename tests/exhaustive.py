"""The fastest plan of a small model, by trying all that a plan can say and the engine can run: what `make_plan`, which
tries few of them, is held to.

Tried are every split into micro-batches, both loop orders, every set of layers on the device, every number of slots,
what each block keeps for itself, where sums, gradients and what enters blocks wait, every length of a segment, and
every set of layers whose state is on disk. Of those only what cannot be faster than asked is not simulated: that its
bounds hold tests/test_plan_bounds.py tells. Not tried are working copies on disk: windows and slots take what those of
five blocks have, and so many blocks cannot be tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatrain_ray.engine.activation_bytes import ActivationBytes
from megatrain_ray.engine.cost_model import CostBasis, SharedPrices, predict
from megatrain_ray.engine.layer_work import work_of
from megatrain_ray.engine.model import ModelStructure
from megatrain_ray.engine.plan import ActivationPolicy, LayerPlan, Plan, Tier
from megatrain_ray.engine.plan_bounds import Bounds
from megatrain_ray.engine.plan_fill import FILLED_SHARE, SHRINKING
from megatrain_ray.engine.plan_request import Candidate, Machine, Request
from megatrain_ray.engine.plan_rows import hbm_rows, host_rows, nvme_rows, resident_bytes
from megatrain_ray.engine.plan_spill import with_spilled
from megatrain_ray.engine.planner import Drafts, fits
from megatrain_ray.engine.visits import LoopOrder

Keeps = tuple[tuple[ActivationPolicy, float], ...]  # of each block: what of its forward waits, its budget if compiled


@dataclass(frozen=True)
class Exhaustive:
    """`request`: of micro-batches of one sequence, which may be split otherwise. A plan may take FILLED_SHARE of the
    device's memory, as `make_plan` has it for what need not be there."""

    structure: ModelStructure
    activations: ActivationBytes
    machine: Machine
    request: Request

    def faster_than(self, limit_s: float) -> Plan | None:
        """The fastest plan that fits and takes less; None: there is none."""
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
        for size in (n for n in range(1, count + 1) if count % n == 0):
            split = replace(self.request, micro_batch_size=size, num_micro_batches=count // size, free_split=False)
            yield _Split(self.structure, self.activations.times(size), self._machine, split)

    @property
    def _machine(self) -> Machine:
        assert self.machine.hbm_bytes is not None
        return replace(self.machine, hbm_bytes=int(FILLED_SHARE * self.machine.hbm_bytes))


class _Split:
    """All plans of one split."""

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
        self._basis = CostBasis(structure, self._layout, work, rates, True, request.z_loss, disk)
        self._shared = SharedPrices()
        # Nothing spills unless `_on_disk` says so.
        self._drafts = Drafts(structure, self._layout, activations, replace(machine, spill=None), request)

    def plans(self, limit_s: float) -> Iterator[Plan]:
        """Those that fit, with predictions, but for what takes `limit_s` or longer in any case."""
        self.limit_s = limit_s
        for way, keeps in itertools.product(self._ways(), self._keeps()):
            if self._least_s(self._with(way, keeps)) >= self.limit_s:
                continue
            sets = self._sets_within(self._room(self._with(way, keeps)))
            for layers, slots in itertools.product(sets, self._slots()):
                candidate = replace(way, hbm_layers=layers, num_block_slots=slots[0], num_edge_slots=slots[1])
                plan = self._with(candidate, keeps)
                if plan.total_bytes(Tier.HBM) > (plan.hbm_limit_bytes or 0):
                    continue
                for whole in self._on_disk(plan):
                    if fits(whole) and self._least_s(whole) < self.limit_s:
                        self.num_simulated += 1
                        yield replace(whole, prediction=predict(whole, self._basis, self._activations, self._shared))

    def _room(self, plan: Plan) -> int:
        """The most that layers may take on the device, however small slots are. `plan`: with none there."""
        rest = (row for row in plan.rows if row.tier is Tier.HBM and row.name not in SHRINKING)
        return (plan.hbm_limit_bytes or 0) - sum(row.num_bytes for row in rest)

    def _sets_within(self, room: int) -> list[frozenset[int]]:
        sizes = [resident_bytes(self._request.precision, layer) for layer in self._layout.layers]
        return [layers for layers in self._sets(range(self._num_layers)) if sum(sizes[i] for i in layers) <= room]

    def _ways(self) -> Iterator[Candidate]:
        """But for layers on the device, slots, and what is kept."""
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
        whole, nothing = (ActivationPolicy.KEEP, 1.0), (ActivationPolicy.RECOMPUTE, 1.0)
        budgets = [(ActivationPolicy.KEEP, cost.activation_budget) for cost in self._activations.budgets_of(1)]
        return itertools.product(budgets or (whole, nothing), repeat=self._num_blocks)

    def _slots(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(1, self._num_blocks + 1), (1, 2))

    def _with(self, candidate: Candidate, keeps: Keeps) -> Plan:
        """The plan in which each block keeps as much."""
        smallest = min(keeps, key=lambda kept: (kept[0] is ActivationPolicy.KEEP, kept[1]))
        plan = self._drafts.plan(replace(candidate, activations=smallest[0], activation_budget=smallest[1]))
        blocks = (
            replace(layer, activations=policy, activation_budget=budget)
            for layer, (policy, budget) in zip(plan.layers[1:-1], keeps, strict=True)
        )
        return self._counted(replace(plan, layers=(plan.layers[0], *blocks, plan.layers[-1])))

    def _counted(self, plan: Plan) -> Plan:
        """With its own arithmetic."""
        hbm = hbm_rows(plan, self._structure, self._layout, self._activations, z_loss=self._request.z_loss)
        spill = self._machine.spill
        plan = replace(plan, spill_limit_bytes=spill.limit_bytes if spill else None)
        return replace(plan, rows=(*hbm, *host_rows(plan, self._layout), *nvme_rows(plan, self._layout)))

    def _on_disk(self, plan: Plan) -> Iterator[Plan]:
        """With the gradients of each set of layers there, and the state of each; where the host has room for all of it,
        with none."""
        yield plan
        if self._machine.spill is None or fits(plan):
            return
        able = sorted(plan.host_layers)
        waiting = [i for i in able if plan.sums is Tier.HBM and plan.layers[i].gradients is Tier.HOST]
        for stored, spilled in itertools.product(self._sets(waiting), [*self._sets(able)]):
            if stored or spilled:
                yield self._counted(with_spilled(plan, _on_disk(plan.layers, stored, spilled), self._layout))

    def _least_s(self, plan: Plan) -> float:
        bounds = Bounds(plan, self._basis, self._activations, self._shared)
        return max(bounds.compute_s, bounds.update_s, bounds.chained_s, bounds.h2d_s, bounds.disk_s)

    def _sets(self, layers: Sequence[int]) -> Iterator[frozenset[int]]:
        sizes = range(len(layers) + 1)
        return map(frozenset, itertools.chain.from_iterable(itertools.combinations(layers, n) for n in sizes))

    @cached_property
    def _num_layers(self) -> int:
        return len(self._structure.layers)

    @cached_property
    def _num_blocks(self) -> int:
        return self._num_layers - 2


def _on_disk(layers: tuple[LayerPlan, ...], stored: frozenset[int], spilled: frozenset[int]) -> tuple[LayerPlan, ...]:
    return tuple(
        replace(
            layer,
            gradients=Tier.NVME if i in stored else layer.gradients,
            state=Tier.NVME if i in spilled else layer.state,
        )
        for i, layer in enumerate(layers)
    )
