"""Plans in which what layers keep waits on the host: of long sequences, as much as there is room for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.flops import work_of
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis, basis_of
from megatrain_ray.engine.planner.cost.predict_step import predict
from megatrain_ray.engine.planner.limits import fits, spare_ram
from megatrain_ray.engine.planner.memory.plan_builder import PlanBuilder
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.engine.planner.request import Candidate, Machine, Request, SpillSpace
from megatrain_ray.engine.planner.search import candidates as tried_ways
from megatrain_ray.engine.planner.search.lower_bounds import Bounds
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.engine.planner.search.search_results import TIE, SearchResults
from megatrain_ray.engine.planner.search.split_search import split_searches
from tests.support.candidate_plans import build_plan

NUM_BLOCKS, SEQ_LEN = 6, 1 << 17
SHAPE = LlamaConfig(
    vocab_size=64, hidden_size=512, intermediate_size=1024, num_hidden_layers=NUM_BLOCKS, num_attention_heads=4,
    num_key_value_heads=1, max_position_embeddings=SEQ_LEN,
)  # fmt: skip
REQUEST = Request(Precision.BF16, False, True, 1, 1, SEQ_LEN, compiled=True, saves=False)
MACHINE = Machine(
    device="cuda", num_cpus=16, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=3660 << 20, profile=TYPICAL_GPU
)


@cache
def shape(*, compiled: bool = True) -> tuple[ModelStructure, ActivationBytes]:
    def factory(dtype: torch.dtype) -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_config(SHAPE, dtype=dtype)
        return model

    return discover(factory, torch.bfloat16, 1, SEQ_LEN, compiled=compiled, chunked=True)


def offloaded(plan: Plan) -> list[int]:
    return [i for i, layer in enumerate(plan.layers) if layer.kept is Tier.HOST]


def row(plan: Plan, tier: Tier, name: str) -> int:
    return sum(r.num_bytes for r in plan.memory_items if (r.tier, r.name) == (tier, name))


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


@pytest.mark.parametrize(("compiled", "hbm_bytes"), [(True, 3584 << 20), (False, 8 << 30)])
def test_what_is_kept_goes_to_the_host_where_the_device_is_full(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, hbm_bytes: int
) -> None:
    """The last block's activations stay, because they would come straight back."""
    request, machine = replace(REQUEST, compiled=compiled), replace(MACHINE, hbm_bytes=hbm_bytes)
    plan = make_plan(*shape(compiled=compiled), machine, request)
    assert fits(plan)
    leaving = offloaded(plan)
    assert len(leaving) >= 2
    assert leaving[-1] < NUM_BLOCKS
    assert (
        plan.host_kept_bytes
        == sum(plan.layers[i].kept_bytes for i in leaving)
        == row(plan, Tier.HOST, "kept activations")
    )
    assert f"\noffload   what {len(leaving)} layers keep waits on the host for their backward, " in describe(plan)
    assert Plan.from_json(plan.to_json()) == plan
    monkeypatch.setattr(tried_ways, "_offloading", lambda request, alike: ())
    without = make_plan(*shape(compiled=compiled), machine, request)
    assert not offloaded(without)
    assert "offload" not in describe(without)
    assert step_s(plan) < 0.85 * step_s(without)


def test_more_memory_of_the_host_takes_more_of_it() -> None:
    """What the layer that keeps the most would need does not fit beside it: it is more than the host has left."""
    numbers, times = [], []
    for ram_bytes in range(5 << 30, 13 << 30, 1 << 30):
        plan = make_plan(*shape(), replace(MACHINE, ram_bytes=ram_bytes), REQUEST)
        assert fits(plan)
        numbers.append(plan.host_kept_bytes)
        times.append(step_s(plan))
        if 0 < len(offloaded(plan)) < NUM_BLOCKS - 1:
            assert spare_ram(plan) < max(layer.kept_bytes for layer in plan.layers)
    assert numbers[0] == 0
    assert numbers[-1] == max(numbers) > 0
    assert all(later <= earlier * (1 + 2 * TIE) for earlier, later in pairwise(times))


def test_where_the_device_has_room_nothing_leaves() -> None:
    structure, activations = shape()
    assert not offloaded(make_plan(structure, activations, replace(MACHINE, hbm_bytes=64 << 30), REQUEST))


@pytest.mark.parametrize(("slower", "expected"), [(0.4, NUM_BLOCKS), (1, 3), (1.5, 2), (4, 1), (400, 0)])
def test_as_many_layers_leave_as_the_link_moves_during_the_forwards(slower: float, expected: int) -> None:
    """Each leaves under the forwards up to the next one that does. Only the last one's is waited for, as with one."""
    (structure, activations), candidate = shape(compiled=False), offloading(0)
    machine = replace(MACHINE, profile=replace(TYPICAL_GPU, both_bytes_per_s=50.8e9 / slower))
    request = replace(REQUEST, compiled=False)
    basis = basis_of(structure, machine, request)
    found = SearchResults()
    search = next(iter(split_searches(basis, machine, request, activations, found)))
    builder = PlanBuilder(structure, structure.layout(), activations, machine, request)
    plans = [builder.plan(candidate._replace(num_offloading=number)) for number in range(NUM_BLOCKS + 1)]
    waits_s = [predict(plan, basis, activations).exposed_s.get("d2h", 0.0) for plan in plans]
    assert offloaded(plans[3]) == [2, 4, 6]
    assert NUM_BLOCKS // math.ceil(search._leaving_forwards(candidate)) == expected
    assert all(wait_s <= 1.02 * waits_s[1] for wait_s in waits_s[: expected + 1])
    assert all(wait_s > 1.05 * waits_s[1] for wait_s in waits_s[max(2, expected + 1) :])


def test_the_device_holds_what_passes() -> None:
    """Two layers' while the forward goes on; where later ones stay these are there when fewer pass."""
    structure, activations = shape()
    keeps = activations.kept_within(1, 1.0)
    of_ends = activations.kept[0]
    for staying, expected in ((0, 2), (1, 2), (2, 3), (NUM_BLOCKS, NUM_BLOCKS)):
        plan = build_plan(structure, activations, MACHINE, REQUEST, offloading(staying))
        assert len(offloaded(plan)) == NUM_BLOCKS - staying
        assert row(plan, Tier.HBM, "kept activations") == expected * keeps + of_ends
        assert row(plan, Tier.HOST, "kept activations") == (NUM_BLOCKS - staying) * keeps


def offloading(num_staying: int, num_offloading: int = NUM_BLOCKS) -> Candidate:
    return Candidate(
        LoopOrder.MICRO_BATCHES_OUTER, ActivationPolicy.KEEP, 2, 1, activation_budget=0.0,
        num_tail_blocks=num_staying, tail_budget=1.0, kept=Tier.HOST, num_offloading=num_offloading,
    )  # fmt: skip


def drafts(request: Request, machine: Machine) -> Iterator[Plan]:
    structure, activations = shape()
    for order in LoopOrder if request.num_micro_batches > 1 else [LoopOrder.MICRO_BATCHES_OUTER]:
        for staying in range(0, NUM_BLOCKS, 2):
            for boundaries in (Tier.HBM, Tier.HOST):
                candidate = offloading(staying)._replace(order=order, boundaries=boundaries)
                yield PlanBuilder(structure, structure.layout(), activations, machine, request).plan(candidate)


@pytest.mark.parametrize("slower", [1, 20, 400])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_no_plan_is_faster_than_its_bounds(slower: int, num_micro_batches: int) -> None:
    structure, activations = shape()
    profile = replace(TYPICAL_GPU, both_bytes_per_s=TYPICAL_GPU.both_bytes_per_s / slower)
    basis = CostBasis(structure, structure.layout(), work_of(structure), profile, True, 0)
    tight = 0.0
    for plan in drafts(replace(REQUEST, num_micro_batches=num_micro_batches), MACHINE):
        predicted_s = predict(plan, basis, activations).step_s
        bounds = Bounds(plan, basis, activations)
        assert max(bounds.compute_s + bounds.late_s, bounds.chained_s, bounds.h2d_s) <= predicted_s * (1 + 1e-9)
        tight = max(tight, bounds.h2d_s / predicted_s)
    assert slower < 400 or tight > 0.4


def test_state_on_disk_makes_room_for_what_is_kept() -> None:
    """The disk has a whole step for it."""
    machine = replace(MACHINE, ram_bytes=6 << 30)
    plain = make_plan(*shape(), machine, REQUEST)
    spilling = make_plan(*shape(), replace(machine, spill=SpillSpace(1 << 40, 3e9)), REQUEST)
    assert fits(spilling)
    assert step_s(spilling) <= step_s(plain)
