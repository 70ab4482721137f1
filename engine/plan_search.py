"""make_plan: of the ways to run a step that fit a machine, the one that is predicted to be the fastest. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from megatrain_ray.engine.cost_model import Setting, least_s, predict
from megatrain_ray.engine.layer_work import work_of
from megatrain_ray.engine.model import LayerKind, ModelStructure
from megatrain_ray.engine.plan import ActivationPolicy, Plan, Tier
from megatrain_ray.engine.plan_report import explain_misfit
from megatrain_ray.engine.plan_request import Candidate, Machine, Request
from megatrain_ray.engine.planner import draft_plan, fits, with_uploads
from megatrain_ray.engine.structure import ActivationBytes
from megatrain_ray.engine.visits import LoopOrder
from megatrain_ray.errors import CapacityError

TIE = 0.01  # what is faster by less than this is not: the simpler of two plans is taken


def make_plan(structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request) -> Plan:
    """The fastest that fits every limit. `activations`: of a micro-batch as requested.

    Raises CapacityError with the arithmetic of the last candidate, which is the smallest.
    """
    layout = structure.layout(request.num_fragments)
    work = work_of(structure, request.active_experts, request.windows)
    setting = Setting(structure, layout, work, machine.rates, machine.profile is not None, request.z_loss)
    found: list[tuple[float, Plan]] = []
    draft, best_s = None, math.inf
    for split in _splits(request):
        of_split = activations.times(split.micro_batch_size // request.micro_batch_size)
        for candidate in candidates(structure, split):
            draft = draft_plan(structure, layout, of_split, machine, split, candidate)
            # One that could only be a little faster than a simpler one would not be taken.
            if not fits(draft) or least_s(draft, setting, of_split) * (1 + TIE) >= best_s:
                continue
            prediction = predict(draft, setting, of_split)
            found.append((prediction.step_s, replace(draft, prediction=prediction)))
            best_s = min(best_s, prediction.step_s)
    if not found:
        assert draft is not None
        raise CapacityError(explain_misfit(draft))
    chosen = next(plan for step_s, plan in found if step_s <= best_s * (1 + TIE))
    return with_uploads(chosen, structure, layout)


def candidates(structure: ModelStructure, request: Request) -> Iterator[Candidate]:
    """The simpler before what is to be tried only where it helps: activations are kept before they are recomputed,
    weights streamed once a step before once for each micro-batch, and sums wait on the device before they wait on the
    host, which costs 8 bytes per parameter over PCIe for every micro-batch."""
    num_blocks = sum(layer.kind is LayerKind.BLOCK for layer in structure.layers)
    several = request.num_micro_batches > 1
    orders = [(LoopOrder.MICRO_BATCHES_OUTER, Tier.HBM)]
    if several:
        orders.insert(0, (LoopOrder.LAYERS_OUTER, Tier.HBM))
    # Three slots: one in use, one arriving, one to let a late load catch up; two still overlap; with one for each block
    # nothing is uploaded twice in a step.
    counts = dict.fromkeys((min(3, num_blocks), num_blocks))
    slots = (*((count, 2) for count in counts), (min(2, num_blocks), 1))
    for policy, num_slots, (order, sums) in itertools.product(ActivationPolicy, slots, orders):
        yield Candidate(order, policy, *num_slots, sums)
    for policy, num_slots in itertools.product(ActivationPolicy, slots if several else ()):
        yield Candidate(LoopOrder.MICRO_BATCHES_OUTER, policy, *num_slots, Tier.HOST)


def _splits(request: Request) -> Iterator[Request]:
    """Fewer and larger micro-batches first; the request itself where it is not free."""
    sequences = request.micro_batch_size * request.num_micro_batches
    for size in range(sequences, 0, -1) if request.free_split else (request.micro_batch_size,):
        if sequences % size == 0:
            yield replace(request, micro_batch_size=size, num_micro_batches=sequences // size)
