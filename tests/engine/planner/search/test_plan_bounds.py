"""What a step takes at least is never more than what it is predicted to take, and not much less where that counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU, HardwareProfile
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.model_layout import largest_share
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.flops import work_of
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.predict_step import predict
from megatrain_ray.engine.planner.memory.plan_builder import PlanBuilder
from megatrain_ray.engine.planner.request import Candidate, Machine, Request, SpillSpace
from megatrain_ray.engine.planner.search.candidates import candidates
from megatrain_ray.engine.planner.search.lower_bounds import Bounds
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.engine.planner.search.search_results import TIE, SearchResults
from tests.support.shapes import qwen

# `make test-all` runs every case: they take a minute.
pytestmark = pytest.mark.spread(4)

MACHINE = Machine(device="cuda", num_cpus=16, num_nodes=1, ram_bytes=1 << 41, hbm_bytes=None, profile=TYPICAL_GPU)
SHORT = replace(MACHINE, ram_bytes=16 << 30, spill=SpillSpace(1 << 40, 3e9))  # of RAM: most of the plans spill
SHORTER = replace(SHORT, ram_bytes=6 << 30)  # most of them working copies, too
REQUEST = Request(Precision.BF16, False, True, 2, 4, 512)
CANDIDATE = Candidate(LoopOrder.MICRO_BATCHES_OUTER, ActivationPolicy.KEEP, 3, 2)
PROFILES = {
    "typical": TYPICAL_GPU,
    "slow copies": replace(TYPICAL_GPU, both_bytes_per_s=TYPICAL_GPU.both_bytes_per_s / 20),
    "slow updates": replace(TYPICAL_GPU, adamw_per_s=TYPICAL_GPU.adamw_per_s / 20),
    "slow products": replace(TYPICAL_GPU, launch_s=1e-3),
}

SEVERAL = {"num_gpus": 2, "micro_batch_size": 16}, {"num_gpus": 4, "num_hosts": 2, "micro_batch_size": 16}


@cache
def shape() -> tuple[Any, ActivationBytes]:
    return qwen(10, REQUEST.seq_len, hidden=2048, heads=16, kv_heads=2, inner=8192)  # type: ignore[no-any-return]


def basis_of(profile: HardwareProfile, disk_bytes_per_s: float = 3e9, num_hosts: int = 1) -> CostBasis:
    structure, _ = shape()
    layout = largest_share(structure.layout(), num_hosts)
    return CostBasis(structure, layout, work_of(structure), profile, True, 0, disk_bytes_per_s)


def plans(request: Request, machine: Machine = MACHINE) -> Iterator[tuple[Plan, ActivationBytes]]:
    structure, activations = shape()
    activations = activations.times(request.micro_batch_size)
    layout = largest_share(structure.layout(), request.num_hosts)
    drafts = PlanBuilder(structure, layout, activations, machine, request)
    for candidate in candidates(structure, request):
        for count in (0, 1, 5, 12):
            on_device = candidate._replace(hbm_layers=frozenset(range(count)))
            yield drafts.plan(on_device), activations


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_micro_batches": 1},
        {"num_micro_batches": 9},
        {"round_gradients": True},
        {"clip": False},
        {"num_gpus": 2, "num_hosts": 2},
        {"num_gpus": 4, "gathers_slots": True},
    ],
)
def test_no_plan_is_faster(changes: dict[str, Any], profile: str) -> None:
    """The search would leave a plan out that is."""
    request = replace(REQUEST, **changes)
    basis = basis_of(PROFILES[profile], num_hosts=request.num_hosts)
    for plan, activations in plans(request):
        step_s = predict(plan, basis, activations).step_s
        bounds = Bounds(plan, basis, activations)
        computed_s = bounds.compute_s + bounds.late_s
        assert max(computed_s, bounds.update_s, bounds.chained_s, bounds.h2d_s) <= step_s * (1 + 1e-9)


@pytest.mark.parametrize("disk_bytes_per_s", [3e8, 3e9, 3e10, 3e11])
@pytest.mark.parametrize("changes", [{}, {"num_micro_batches": 9}, {"clip": False}, *SEVERAL])
def test_no_plan_that_spills_is_faster(changes: dict[str, Any], disk_bytes_per_s: float) -> None:
    request = replace(REQUEST, **changes)
    basis = basis_of(TYPICAL_GPU, disk_bytes_per_s, request.num_hosts)
    counts, tight, with_weights = set(), 0.0, 0
    for plan, activations in itertools.chain(plans(request, SHORT), plans(request, SHORTER)):
        step_s = predict(plan, basis, activations).step_s
        bounds = Bounds(plan, basis, activations)
        most = max(bounds.compute_s + bounds.late_s, bounds.update_s, bounds.chained_s, bounds.h2d_s, bounds.disk_s)
        assert most <= step_s * (1 + 1e-9)
        counts.add(len(plan.spilled_layers))
        with_weights += bool(plan.weights_on_disk)
        tight = max(tight, bounds.disk_s / step_s)
    assert len(counts) > 2
    assert with_weights > 10 if request.num_gpus == 1 else not with_weights
    assert tight > 0.95 or disk_bytes_per_s > 1e9


@pytest.mark.parametrize("disk_bytes_per_s", [6e8, 1.8e9, 1.2e10])
@pytest.mark.parametrize(
    ("hbm_bytes", "ram_bytes"),
    [
        (12_006_147_952, 21_682_922_532),
        (12_006_147_952, 20_000_000_000),
        (12_000_000_000, 16_000_000_000),
        (10_000_000_000, 18_000_000_000),
    ],
)
def test_bounds_leave_nothing_faster_out(
    monkeypatch: pytest.MonkeyPatch, hbm_bytes: int, ram_bytes: int, disk_bytes_per_s: float
) -> None:
    """The ends of the models are large: gradients wait in the place of few layers, or in no place at all."""
    question = qwen(6, 512, hidden=1024, heads=16, kv_heads=2, inner=4096, vocab=600_000)
    profile = replace(
        TYPICAL_GPU,
        both_bytes_per_s=TYPICAL_GPU.both_bytes_per_s * 2.54,
        adamw_per_s=TYPICAL_GPU.adamw_per_s * 1.42,
    )
    spill = SpillSpace(1 << 37, disk_bytes_per_s)
    machine = Machine("cuda", 16, 1, ram_bytes, hbm_bytes, profile, spill)
    request = Request(Precision.BF16, False, True, 1, 1, 512, captured=False)
    bounded = make_plan(*question, machine, request)
    for name in ("may_be_chosen", "may_be_beaten_in"):
        monkeypatch.setattr(SearchResults, name, lambda found, least: True)
    whole = make_plan(*question, machine, request)
    assert bounded.prediction and whole.prediction
    assert bounded.prediction.step_s <= whole.prediction.step_s * (1 + TIE)
    assert bounded.spilled_layers or bounded.gradients_on_device


def bounds_and_step(profile: str, request: Request, candidate: Candidate) -> tuple[Bounds, float]:
    (structure, activations), basis = shape(), basis_of(PROFILES[profile])
    activations = activations.times(request.micro_batch_size)
    plan = PlanBuilder(structure, structure.layout(), activations, MACHINE, request).plan(candidate)
    return Bounds(plan, basis, activations), predict(plan, basis, activations).step_s


def test_updates_before_a_forward_are_counted_with_what_follows_them() -> None:
    bounds, step_s = bounds_and_step("typical", REQUEST, CANDIDATE)
    assert bounds.chained_s > 0.6 * step_s
    assert bounds.chained_s > 1.2 * max(bounds.compute_s, bounds.update_s)


def test_copies_for_every_micro_batch_are_counted() -> None:
    request = replace(REQUEST, num_micro_batches=9)
    for sums in (Tier.HBM, Tier.HOST):
        bounds, step_s = bounds_and_step("slow copies", request, CANDIDATE._replace(sums=sums))
        assert bounds.h2d_s > max(0.2 * step_s, 1.1 * bounds.compute_s, 1.1 * bounds.chained_s)


def test_plans_of_one_request_share_what_they_know() -> None:
    basis = basis_of(TYPICAL_GPU)
    for plan, activations in plans(REQUEST):
        alone = basis_of(TYPICAL_GPU)
        shared, own = Bounds(plan, basis, activations), Bounds(plan, alone, activations)
        assert (shared.compute_s, shared.update_s) == (own.compute_s, own.update_s)
        assert predict(plan, basis, activations) == predict(plan, alone, activations)
