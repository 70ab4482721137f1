"""What drafts of plans share: a plan is the same whatever was drafted before it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.limits import beyond_disk, spare_ram
from megatrain_ray.engine.planner.memory.plan_builder import PlanBuilder
from megatrain_ray.engine.planner.request import Candidate, Machine, Request, SpillSpace
from megatrain_ray.engine.planner.search.candidates import candidates
from tests.engine.planner.search.test_exhaustive import compiled, shape

BLOCKS = 4
REQUEST = Request(Precision.BF16, False, True, 1, 4, 2048, free_split=True, saves=False, captured=False)
DISK = SpillSpace(1 << 40, 3e9)


def drafts(*, budgets: bool, ram_bytes: int) -> PlanBuilder:
    structure, activations = shape(BLOCKS)
    if budgets:
        activations = compiled(activations)
    machine = Machine("cuda", 16, 1, ram_bytes, 2 << 30, TYPICAL_GPU, DISK)
    return PlanBuilder(structure, structure.layout(), activations, machine, replace(REQUEST, compiled=budgets))


def some(of: PlanBuilder, count: int) -> Iterator[Candidate]:
    """Yield `count` candidates that the search tries.

    They have layers on the device, blocks that keep more, and gradients that wait there.
    """
    choice = random.Random(0)
    ways = list(candidates(of.structure, of.request))
    moving = [way for way in ways if Tier.HOST in (way.boundaries, way.kept)]
    ways += [way._replace(spills_activations=True) for way in moving]
    for way in itertools.islice(itertools.cycle(ways), count):
        layers = choice.choice((range(choice.randint(0, 6)), choice.sample(range(6), choice.randint(0, 6))))
        changes = {
            "hbm_layers": frozenset(layers),
            "num_tail_blocks": choice.randint(0, BLOCKS),
            "num_offloading": choice.randint(0, BLOCKS) if way.kept is Tier.HOST else 0,
            "num_waiting": choice.randint(0, 3),
        }
        yield way._replace(**changes)


@pytest.mark.parametrize("budgets", [True, False])
@pytest.mark.parametrize("ram_gib", [4, 5, 1000])
def test_what_was_drafted_before_makes_no_difference(ram_gib: int, budgets: bool) -> None:
    shared = drafts(budgets=budgets, ram_bytes=ram_gib << 30)
    plans: dict[Candidate, Plan] = {}
    for candidate in some(shared, 500):
        shared.device_bytes(candidate)
        plans[candidate] = shared.plan(candidate)
    for candidate in list(plans)[::-9]:
        assert drafts(budgets=budgets, ram_bytes=ram_gib << 30).plan(candidate) == plans[candidate]


@pytest.mark.parametrize("budgets", [True, False])
@pytest.mark.parametrize("ram_gib", [4, 5, 1000])
def test_less_detail_says_the_same(ram_gib: int, budgets: bool) -> None:
    of = drafts(budgets=budgets, ram_bytes=ram_gib << 30)
    for candidate in some(of, 500):
        plan, least = of.plan(candidate), of.least_device_bytes(candidate)
        assert of.without_rows(candidate) == replace(plan, memory_items=())
        assert least <= of.device_bytes(candidate) == plan.total_bytes(Tier.HBM)
        assert of.host_room(candidate) == (-beyond_disk(plan) or spare_ram(plan) + 1)
