"""make_plan: of the ways to run a step that fit a machine, the one that is predicted to be the fastest. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from megatrain_ray.engine.activation_bytes import ActivationBytes
from megatrain_ray.engine.compile_trial import ACTIVATION_BUDGETS
from megatrain_ray.engine.cost_model import CostBasis, SharedPrices, predict
from megatrain_ray.engine.layer_work import work_of
from megatrain_ray.engine.model import LayerKind, ModelStructure
from megatrain_ray.engine.plan import ActivationPolicy, Plan, Tier
from megatrain_ray.engine.plan_bounds import Bounds
from megatrain_ray.engine.plan_capture import captured, is_slowed_by_launches
from megatrain_ray.engine.plan_chunks import may_chunk, mlp_chunk_tokens
from megatrain_ray.engine.plan_fill import Filling, fewest_layers
from megatrain_ray.engine.plan_report import explain_misfit
from megatrain_ray.engine.plan_request import Candidate, Machine, Request
from megatrain_ray.engine.plan_rows import resident_bytes
from megatrain_ray.engine.planner import Drafts, missing_bytes, with_uploads
from megatrain_ray.engine.prediction import Prediction
from megatrain_ray.engine.visits import LoopOrder
from megatrain_ray.errors import CapacityError, ConfigError

GRADIENT_BYTES = 4  # of an element that waits, at most
SEGMENTS = (2, 4, 8)  # layers of which what enters the first waits; more save little more
FEW_BLOCKS = 32  # with more of them one more on the device, or less, makes a step less than 3 % longer
TIE = 0.002  # what is faster by less than this is not: the simpler of two plans is taken


def make_plan(structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request) -> Plan:
    """The fastest that fits every limit. `activations`: of a micro-batch as requested.

    Raises CapacityError with the arithmetic of the plan that misses the fewest bytes, and ConfigError where what is
    asked for cannot be.
    """
    basis = _basis(structure, machine, request)
    if request.captured:
        plan = _fastest_captured(basis, machine, request, activations)
    else:
        plan = _fastest(basis, machine, request, activations)
        of_plan = activations.times(plan.micro_batch_size // request.micro_batch_size)
        if request.captured is None and machine.device == "cuda" and is_slowed_by_launches(plan, basis, of_plan):
            with suppress(CapacityError, ConfigError):
                other = _fastest_captured(basis, machine, request, activations)
                plan = min(plan, other, key=lambda p: p.prediction.step_s if p.prediction else math.inf)
    return with_uploads(plan, structure, basis.layout)


def predict_plan(
    plan: Plan, structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request
) -> Prediction:
    """Of a plan that was made for this request before, by the machine's rates now. `activations` as of `make_plan`."""
    of_plan = activations.times(plan.micro_batch_size // request.micro_batch_size)
    if plan.mlp_chunk_tokens:
        of_plan = of_plan.in_chunks() or of_plan
    return predict(plan, _basis(structure, machine, request), of_plan)


def _basis(structure: ModelStructure, machine: Machine, request: Request) -> CostBasis:
    layout = structure.layout(request.num_fragments)
    work = work_of(structure, request.active_experts, request.windows)
    disk = machine.spill.bytes_per_s if machine.spill else math.inf
    return CostBasis(structure, layout, work, machine.rates, machine.profile is not None, request.z_loss, disk)


def _fastest_captured(basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes) -> Plan:
    """Of those with a captured step."""
    request = captured(request, machine, basis.layout)
    try:
        return _fastest(basis, machine, request, activations)
    except CapacityError as error:
        raise CapacityError(f"hardware.cuda_graphs: with a captured step, all layers in GPU memory: {error}") from None


def _fastest(basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes) -> Plan:
    """Of all splits. `activations`, here and below: of a micro-batch as requested. Raises as `make_plan`."""
    found = _Found()
    for search in _searches(basis, machine, request, activations, found):
        search.run()
    if not found.plans:
        smallest = partial(_smallest, basis, machine, activations=activations)
        plan = smallest(request)
        # What a remedy saves are gradients that wait: where more is missing there is nothing to try.
        may_help = missing_bytes(plan) <= GRADIENT_BYTES * plan.num_trained
        raise CapacityError(explain_misfit(plan, _remedy(smallest, request) if may_help else None))
    return found.chosen()


def _searches(
    basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes, found: _Found
) -> Iterator[_SplitSearch]:
    """One for each split; two where sequences are long, the second with MLPs in chunks. `found`: gets what fits."""
    for split in _splits(request):
        of_split = activations.times(split.micro_batch_size // request.micro_batch_size)
        yield _SplitSearch(basis, machine, split, of_split, found)
        chunk_tokens = mlp_chunk_tokens(basis.structure, split.micro_batch_size, split.seq_len)
        if chunk_tokens and (in_chunks := of_split.in_chunks()):
            yield _SplitSearch(basis, machine, replace(split, mlp_chunk_tokens=chunk_tokens), in_chunks, found)


def _smallest(basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes) -> Plan:
    """Of all that can be tried the plan that misses the fewest bytes; the first where several do."""
    searches = _searches(basis, machine, request, activations, _Found())
    return min((plan for search in searches for plan in search.smallest()), key=missing_bytes)


def _remedy(smallest: Callable[[Request], Plan], request: Request) -> str | None:
    """Settings with which something fits within the same limits, those that change least. None: there are none."""
    rounded, unclipped = replace(request, round_gradients=True), replace(request, clip=False)
    tried = {
        "train.grad_dtype=bf16": rounded,
        "train.clip=null": unclipped,
        "train.grad_dtype=bf16 and train.clip=null": replace(rounded, clip=False),
    }
    changed = ((settings, other) for settings, other in tried.items() if other != request)
    possible = (pair for pair in changed if pair[1].clip or not request.captured)
    return next((settings for settings, other in possible if missing_bytes(smallest(other)) == 0), None)


class _Found:
    """Plans with a prediction, in the order in which they were tried: the simpler first."""

    def __init__(self) -> None:
        self.plans: list[tuple[float, Plan]] = []  # with seconds of a step
        self.best_s = math.inf

    def add(self, plan: Plan) -> None:
        assert plan.prediction is not None
        self.plans.append((plan.prediction.step_s, plan))
        self.best_s = min(self.best_s, plan.prediction.step_s)

    def may_be_beaten_in(self, least_s: float) -> bool:
        """By what takes at least this long: what is only a little faster than a simpler one is not taken."""
        return least_s * (1 + TIE) < self.best_s

    def chosen(self) -> Plan:
        """The simplest of those that nothing beats by more than TIE."""
        return next(plan for step_s, plan in self.plans if step_s <= self.best_s * (1 + TIE))


class _SplitSearch:
    """Tries the candidates of one split one after the other, each only if it may be better than what was found."""

    def __init__(
        self, basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes, found: _Found
    ) -> None:
        """`request`: with the split. `activations`: of one of its micro-batches. `found`: gets what fits."""
        self._basis = basis
        self._machine = machine
        self._request = request
        self._activations = activations
        self._found = found
        # Not those that Muon trains, whose momenta are the shards'.
        self._able = tuple(i for i, layer in enumerate(basis.layout.layers) if not layer.num_muon)
        self._layer_bytes = [resident_bytes(request.precision, layer) for layer in basis.layout.layers]
        self._num_blocks = sum(layer.kind is LayerKind.BLOCK for layer in basis.structure.layers)
        self._fixed = self._fixed_count()
        self._candidates = list(candidates(basis.structure, request))
        if machine.spill is not None:
            moving = [c for c in self._candidates if Tier.HOST in (c.boundaries, c.kept)]
            self._candidates += [replace(candidate, spills_activations=True) for candidate in moving]
        self._shared = SharedPrices()
        self._drafts = Drafts(basis.structure, basis.layout, activations, machine, request)
        self._draft = cache(self._drafts.plan)
        self._fewest_of = cache(self._count_fewest)
        self._compute_s: dict[tuple[LoopOrder, ActivationPolicy, tuple[float, float], int], float] = {}

    def run(self) -> None:
        for candidate in self._candidates:
            if self._waits_needlessly(candidate) or self._spills_needlessly(candidate):
                continue
            for able in self._orders:
                filling = self._filling(candidate, able)
                if not self._found.may_be_beaten_in(self._least_compute_s(filling)):
                    break
                for plan in filling.plans(self._may_win):
                    prediction = predict(plan, self._basis, self._activations, self._shared)
                    self._found.add(replace(plan, prediction=prediction))

    def smallest(self) -> Iterator[Plan]:
        """Of every candidate the plan that takes least."""
        return (self._filling(candidate, self._able).smallest() for candidate in self._candidates)

    @property
    def _orders(self) -> Iterable[tuple[int, ...]]:
        """In which layers come to live on the device: that of a forward, whose first updates are waited for first; with
        the ends last, in whose place there may be room for a block, which would be uploaded twice; and the smallest
        first, where there is none."""
        if self._has_many_blocks or self._fixed is not None:
            return (self._able,)
        ends = 0, len(self._layer_bytes) - 1
        ends_last = tuple(sorted(self._able, key=lambda i: i in ends))
        smallest_first = tuple(sorted(self._able, key=lambda i: self._layer_bytes[i]))
        return dict.fromkeys((self._able, ends_last, smallest_first))

    @property
    def _has_many_blocks(self) -> bool:
        return self._num_blocks > FEW_BLOCKS

    def _filling(self, candidate: Candidate, able: tuple[int, ...]) -> Filling:
        fewest, is_fixed = self._fewest(candidate, able), self._fixed is not None
        drafts, sizes = self._drafts, self._layer_bytes
        return Filling(self._draft, drafts.on_device, candidate, able, sizes, self._num_blocks, fewest, fixed=is_fixed)

    def _fixed_count(self) -> int | None:
        """How many layers must live on the device. Raises ConfigError where that many cannot."""
        count = self._request.hbm_layers
        if count is None:
            return None if self._machine.device == "cuda" else 0
        if count > len(self._able):
            raise ConfigError(
                f"hardware.hbm_layers: {count} layers cannot live on the device, only {len(self._able)} of "
                f"{len(self._basis.layout.layers)} (embedding and head are layers, too; what Muon trains stays on "
                "the host)"
            )
        return count

    def _waits_needlessly(self, candidate: Candidate) -> bool:
        """Whether gradients wait on the device, from where they would leave late, and the host has room for them. Where
        blocks are few it may be faster all the same: the regions that gradients leave from, sums of whole blocks, are
        not needed then."""
        if candidate.gradients is not Tier.HBM or not self._found.plans or not self._has_many_blocks:
            return False
        on_host = replace(candidate, gradients=Tier.HOST)
        return not self._fewest(on_host, self._able) and not self._draft(on_host).uses_disk

    def _spills_needlessly(self, candidate: Candidate) -> bool:
        """Whether activations may go to the disk where something fits without, and sequences are too short for what a
        layer moves to take less time than what it computes."""
        return candidate.spills_activations and bool(self._found.plans) and not may_chunk(self._request.seq_len)

    def _fewest(self, candidate: Candidate, able: tuple[int, ...]) -> int:
        """Layers that must live on the device. Slots and what is kept there make no difference to the host, so one
        candidate stands for all that differ in nothing else."""
        names = "order", "sums", "gradients", "boundaries", "spills_activations"
        alike = replace(self._candidates[0], **{name: getattr(candidate, name) for name in names})
        return self._fewest_of(alike, able)

    def _count_fewest(self, candidate: Candidate, able: tuple[int, ...]) -> int:
        return fewest_layers(self._draft, candidate, able) if self._fixed is None else self._fixed

    def _least_compute_s(self, filling: Filling) -> float:
        """With as much kept as can be. Slots and tiers make no difference to it."""
        candidate = filling.candidate
        budgets = candidate.activation_budget, candidate.late_budget
        key = candidate.order, candidate.activations, budgets, candidate.segment
        if key not in self._compute_s:
            self._compute_s[key] = self._bounds(self._drafts.without_rows(filling.most_kept)).compute_s
        return self._compute_s[key]

    def _may_win(self, plan: Plan) -> bool:
        bounds = self._bounds(plan)
        if not self._found.may_be_beaten_in(max(bounds.compute_s, bounds.update_s)):
            return False
        # What takes as long as a simpler one changes nothing.
        return max(bounds.chained_s, bounds.h2d_s, bounds.disk_s) < self._found.best_s

    def _bounds(self, plan: Plan) -> Bounds:
        return Bounds(plan, self._basis, self._activations, self._shared)


def candidates(structure: ModelStructure, request: Request) -> Iterator[Candidate]:
    """The simpler before what is to be tried only where it helps: activations are kept before they are recomputed,
    weights streamed once a step before once for each micro-batch, and sums wait on the device before they wait on the
    host, which costs 8 bytes per parameter over PCIe for every micro-batch. Complete gradients wait on the host where
    it has room for them. What enters blocks leaves the device where it would fill it, with many tokens at a time, or is
    computed again, which costs up to a forward more."""
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
    if request.captured:  # sums and boundaries on the host would come and go within it
        return
    for (policy, budget), num_slots in itertools.product(policies, slots if several else ()):
        yield Candidate(orders[-1], policy, *num_slots, sums=Tier.HOST, activation_budget=budget)
    for (policy, budget), num_slots in itertools.product(policies[1:], (slots[0], slots[-1])):
        yield Candidate(orders[0], policy, *num_slots, boundaries=Tier.HOST, activation_budget=budget)
    policy, budget = policies[-1]
    for wait, order, segment in itertools.product(waits, orders, SEGMENTS):
        yield Candidate(order, policy, *slots[0], gradients=wait, segment=segment, activation_budget=budget)
    if may_chunk(request.seq_len):
        yield from _offloading(request, Candidate(orders[-1], *policies[-1][:1], *slots[-1]))


def _offloading(request: Request, alike: Candidate) -> Iterator[Candidate]:
    """Blocks whose kept activations wait on the host: of long sequences, which take long to compute for what they keep.
    The others keep nothing, or what the next smaller budget lets them. `alike`: but for that."""
    pairs = [(late, less) for late, less in itertools.pairwise(ACTIVATION_BUDGETS)]
    pairs += [(late, ACTIVATION_BUDGETS[-1]) for late, less in pairs[:-1]]
    if not request.compiled:
        alike, pairs = replace(alike, activations=ActivationPolicy.KEEP), [(1.0, 0.0)]
    for (late, less), boundaries in itertools.product(pairs, (Tier.HBM, Tier.HOST)):
        yield replace(alike, boundaries=boundaries, activation_budget=less, late_budget=late, kept=Tier.HOST)


def _splits(request: Request) -> Iterator[Request]:
    """Fewer and larger micro-batches first; the request itself where it is not free."""
    sequences = request.micro_batch_size * request.num_micro_batches
    for size in range(sequences, 0, -1) if request.free_split else (request.micro_batch_size,):
        if sequences % size == 0:
            yield replace(request, micro_batch_size=size, num_micro_batches=sequences // size)
