"""Lists the ways to run a step that are tried, and the splits into micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from megatrain_ray.engine.discovery.compile_trial import ACTIVATION_BUDGETS
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.request import Candidate, Request

VERY_FEW_BLOCKS = 4
FEWEST_SLOTS = (1, 1)  # for blocks, and for embedding and head
SEGMENTS = (2, 4, 8)  # layers of which only the first one's input is kept; more save little more


def candidates(structure: ModelStructure, request: Request) -> Iterator[Candidate]:
    """Yield the ways to run a step, the simpler ones first.

    The others are to be tried only if they help:
    - Activations are kept before they are recomputed.
    - Weights stream once per step before they stream once for each micro-batch.
    - Sums wait on the device before they wait on the host, which costs 8 bytes per parameter over PCIe for every
      micro-batch.
    - Complete gradients wait on the host if it has room for them.
    - Inputs of blocks are offloaded if they would fill the device, with many tokens at a time; or they are recomputed,
      which costs up to one forward more.
    """
    num_blocks = sum(layer.kind is LayerKind.BLOCK for layer in structure.layers)
    several = request.num_micro_batches > 1
    orders = [LoopOrder.MICRO_BATCHES_OUTER]
    if several:
        orders.insert(0, LoopOrder.LAYERS_OUTER)
    waits = (Tier.HOST, Tier.HBM) if request.clip and not request.round_gradients else (Tier.HOST,)
    slots = _slots(num_blocks)
    policies = [(ActivationPolicy.KEEP, 1.0), (ActivationPolicy.RECOMPUTE, 0.0)]
    if request.compiled and not structure.is_divided:
        # As soon as compiled layers keep less than all, layers that are not compiled are recomputed.
        policies[1:] = [(ActivationPolicy.RECOMPUTE, budget) for budget in ACTIVATION_BUDGETS[1:]]
    for (policy, budget), wait, num_slots, order in itertools.product(policies, waits, slots, orders):
        yield Candidate(order, policy, *num_slots, gradients=wait, activation_budget=budget)
    if request.captured:  # a captured step cannot offload sums or inputs and reload them
        return
    on_host = several and request.num_gpus == 1  # GPUs share one slab, without room for a sum of each
    for (policy, budget), num_slots in itertools.product(policies, slots if on_host else ()):
        yield Candidate(orders[-1], policy, *num_slots, sums=Tier.HOST, activation_budget=budget)
    for (policy, budget), num_slots in itertools.product(policies[1:], (slots[0], slots[-1])):
        yield Candidate(orders[0], policy, *num_slots, boundaries=Tier.HOST, activation_budget=budget)
    policy, budget = policies[-1]
    for wait, order, segment in itertools.product(waits, orders, SEGMENTS):
        yield Candidate(order, policy, *slots[0], gradients=wait, segment=segment, activation_budget=budget)
    for order in orders:
        alike = Candidate(order, policies[-1][0], *slots[-1])
        yield from (_offloading_parts if structure.is_divided else _offloading)(request, alike)


def _slots(num_blocks: int) -> tuple[tuple[int, int], ...]:
    """Return the numbers of slots that are tried: for blocks, and for embedding and head.

    With three for blocks one is in use, one is being filled, and one lets a late load catch up. Two still overlap. With
    one for each block nothing is uploaded twice in a step.
    """
    counts = dict.fromkeys((min(3, num_blocks), num_blocks))
    slots = (*((count, 2) for count in counts), (min(2, num_blocks), 1))
    if num_blocks <= VERY_FEW_BLOCKS:  # one slot more is a large share of so few blocks
        slots = (*slots, FEWEST_SLOTS)
    return slots


def _offloading_parts(request: Request, alike: Candidate) -> Iterator[Candidate]:
    """Yield the candidates that offload kept activations of divided blocks.

    Divided blocks are not compiled, and what they save between parts is offloaded, too.
    """
    on_host = request.num_micro_batches > 1 and request.num_gpus == 1  # as in candidates
    for sums in (Tier.HBM, Tier.HOST)[: 1 + on_host]:
        yield from _offloading(replace(request, compiled=False), alike._replace(sums=sums))


def _offloading(request: Request, alike: Candidate) -> Iterator[Candidate]:
    """Yield the candidates whose last blocks offload their kept activations.

    They are for long sequences, which take long to compute for what they keep, and for divided blocks, which keep some
    activations that are never recomputed. The other blocks keep nothing, or what the next smaller budget lets them.

    alike: what all of these candidates have in common.
    """
    pairs = [(more, less) for more, less in itertools.pairwise(ACTIVATION_BUDGETS)]
    pairs += [(more, ACTIVATION_BUDGETS[-1]) for more, less in pairs[:-1]]
    if not request.compiled:
        alike, pairs = alike._replace(activations=ActivationPolicy.KEEP), [(1.0, 0.0)]
    for (more, less), boundaries in itertools.product(pairs, (Tier.HBM, Tier.HOST)):
        yield alike._replace(boundaries=boundaries, activation_budget=less, tail_budget=more, kept=Tier.HOST)


def splits(request: Request) -> Iterator[Request]:
    """Yield the splits into micro-batches, fewer and larger ones first; only the request itself if it is not free."""
    sequences = request.micro_batch_size * request.num_micro_batches
    for size in range(sequences, 0, -1) if request.free_split else (request.micro_batch_size,):
        if sequences % size == 0:
            yield replace(request, micro_batch_size=size, num_micro_batches=sequences // size)
