"""make_plan: of the ways to run a step that fit a machine, the one that is predicted to be the fastest. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from megatrain_ray.engine.activation_bytes import ActivationBytes
from megatrain_ray.engine.compile_trial import ACTIVATION_BUDGETS
from megatrain_ray.engine.cost_model import CostBasis, SharedPrices, predict
from megatrain_ray.engine.layer_work import work_of
from megatrain_ray.engine.model import LayerKind, ModelStructure
from megatrain_ray.engine.plan import ActivationPolicy, Plan, Tier
from megatrain_ray.engine.plan_bounds import Bounds
from megatrain_ray.engine.plan_fill import Filling, fewest_layers
from megatrain_ray.engine.plan_report import explain_misfit
from megatrain_ray.engine.plan_request import Candidate, Machine, Request
from megatrain_ray.engine.planner import Drafts, draft_plan, with_uploads
from megatrain_ray.engine.visits import LoopOrder
from megatrain_ray.errors import CapacityError, ConfigError

TIE = 0.002  # what is faster by less than this is not: the simpler of two plans is taken


def make_plan(structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request) -> Plan:
    """The fastest that fits every limit. `activations`: of a micro-batch as requested.

    Raises CapacityError with the arithmetic of the last candidate, which is the smallest.
    """
    layout = structure.layout(request.num_fragments)
    work = work_of(structure, request.active_experts, request.windows)
    basis = CostBasis(structure, layout, work, machine.rates, machine.profile is not None, request.z_loss)
    search = _Search(basis, machine)
    for split in _splits(request):
        search.try_split(split, activations.times(split.micro_batch_size // request.micro_batch_size))
    return with_uploads(search.chosen(), structure, layout)


class _Search:
    """Tries the candidates of one split after the other, each only if it may be better than what was found."""

    def __init__(self, basis: CostBasis, machine: Machine) -> None:
        self._basis = basis
        self._machine = machine
        # Not those that Muon trains, whose momenta are the shards'.
        self._able = [i for i, layer in enumerate(basis.layout.layers) if not layer.num_muon]
        self._num_blocks = sum(layer.kind is LayerKind.BLOCK for layer in basis.structure.layers)
        self._found: list[tuple[float, Plan]] = []
        self._best_s = math.inf
        self._last: Filling | None = None

    def try_split(self, request: Request, activations: ActivationBytes) -> None:
        drafts, shared = Drafts(), SharedPrices()

        @cache
        def draft(candidate: Candidate) -> Plan:
            basis = self._basis
            return draft_plan(basis.structure, basis.layout, activations, self._machine, request, candidate, drafts)

        @cache
        def fewest(where: Candidate) -> int:
            return fewest_layers(draft, where, self._able) if fixed is None else fixed

        def may_win(plan: Plan) -> bool:
            bounds = Bounds(plan, self._basis, activations, shared)
            # What takes as long as a simpler one changes nothing.
            return (
                self._may_win(max(bounds.compute_s, bounds.update_s))
                and max(bounds.chained_s, bounds.h2d_s) < self._best_s
            )

        fixed = self._fixed(request)
        computed_s: dict[tuple[LoopOrder, ActivationPolicy, float], float] = {}  # with as much kept as can be
        first = None
        for candidate in candidates(self._basis.structure, request):
            first = first or candidate  # of those that only differ in what is on the device
            where = replace(
                first,
                order=candidate.order,
                sums=candidate.sums,
                gradients=candidate.gradients,
                boundaries=candidate.boundaries,
            )
            if candidate.gradients is Tier.HBM and self._found and not fewest(replace(where, gradients=Tier.HOST)):
                continue  # the host has room for them, from where they would leave late
            filling = Filling(draft, candidate, self._able, self._num_blocks, fewest(where), fixed is not None)
            kept = candidate.order, candidate.activations, candidate.activation_budget
            if kept not in computed_s:
                computed_s[kept] = Bounds(draft(filling.most_kept), self._basis, activations, shared).compute_s
            if not self._may_win(computed_s[kept]):
                continue
            self._last = filling
            for plan in filling.plans(may_win):
                self._add(replace(plan, prediction=predict(plan, self._basis, activations, shared)))

    def _fixed(self, request: Request) -> int | None:
        """How many layers must live on the device. Raises ConfigError where that many cannot."""
        count = request.hbm_layers
        if count is None:
            return None if self._machine.device == "cuda" else 0
        if count > len(self._able):
            raise ConfigError(
                f"hardware.hbm_layers: {count} layers cannot live on the device, only {len(self._able)} of "
                f"{len(self._basis.layout.layers)} (embedding and head are layers, too; what Muon trains stays on "
                "the host)"
            )
        return count

    def _may_win(self, least: float) -> bool:
        """What could only be a little faster than a simpler one would not be taken."""
        return least * (1 + TIE) < self._best_s

    def _add(self, plan: Plan) -> None:
        assert plan.prediction is not None
        self._found.append((plan.prediction.step_s, plan))
        self._best_s = min(self._best_s, plan.prediction.step_s)

    def chosen(self) -> Plan:
        if not self._found:
            assert self._last is not None
            raise CapacityError(explain_misfit(self._last.smallest()))
        return next(plan for step_s, plan in self._found if step_s <= self._best_s * (1 + TIE))


def candidates(structure: ModelStructure, request: Request) -> Iterator[Candidate]:
    """The simpler before what is to be tried only where it helps: activations are kept before they are recomputed,
    weights streamed once a step before once for each micro-batch, and sums wait on the device before they wait on the
    host, which costs 8 bytes per parameter over PCIe for every micro-batch. Complete gradients wait on the host where
    it has room for them. What enters blocks leaves the device where it would fill it: with many tokens at a time."""
    num_blocks = sum(layer.kind is LayerKind.BLOCK for layer in structure.layers)
    several = request.num_micro_batches > 1
    orders = [LoopOrder.MICRO_BATCHES_OUTER]
    if several:
        orders.insert(0, LoopOrder.LAYERS_OUTER)
    waits = (Tier.HOST, Tier.HBM) if request.clip and not request.round_gradients else (Tier.HOST,)
    # Three slots: one in use, one arriving, one to let a late load catch up; two still overlap; with one for each block
    # nothing is uploaded twice in a step.
    counts = dict.fromkeys((min(3, num_blocks), num_blocks))
    slots = (*((count, 2) for count in counts), (min(2, num_blocks), 1))
    policies = [(ActivationPolicy.KEEP, 1.0), (ActivationPolicy.RECOMPUTE, 0.0)]
    if request.compiled:  # what is not compiled is recomputed as soon as what is keeps less
        policies[1:] = [(ActivationPolicy.RECOMPUTE, budget) for budget in ACTIVATION_BUDGETS[1:]]
    for (policy, budget), wait, num_slots, order in itertools.product(policies, waits, slots, orders):
        yield Candidate(order, policy, *num_slots, gradients=wait, activation_budget=budget)
    for (policy, budget), num_slots in itertools.product(policies, slots if several else ()):
        yield Candidate(orders[-1], policy, *num_slots, sums=Tier.HOST, activation_budget=budget)
    for (policy, budget), num_slots in itertools.product(policies[1:], (slots[0], slots[-1])):
        yield Candidate(orders[0], policy, *num_slots, boundaries=Tier.HOST, activation_budget=budget)


def _splits(request: Request) -> Iterator[Request]:
    """Fewer and larger micro-batches first; the request itself where it is not free."""
    sequences = request.micro_batch_size * request.num_micro_batches
    for size in range(sequences, 0, -1) if request.free_split else (request.micro_batch_size,):
        if sequences % size == 0:
            yield replace(request, micro_batch_size=size, num_micro_batches=sequences // size)
