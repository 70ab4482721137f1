"""Each kind of traffic has the rate of the way that it takes: what is packed, and activations, which never are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain_ray.engine.device.hardware_profile import TYPICAL_CPU
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.flops import work_of
from megatrain_ray.engine.plan.residency import residency_of
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.op_costs import Prices
from megatrain_ray.engine.planner.cost.simulate_step import Simulation
from megatrain_ray.virtual_clock import Stage
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, folder_source, plan_for, train_engine
from tests.support.tiny import build_tiny, tiny_batches

PACKED, PLAIN = 4e7, 1e7  # bytes a second
EVERYTHING = Mode(
    LoopOrder.LAYERS_OUTER, spilled=frozenset({1, 2, 3}), stored=frozenset({1, 2, 3}), on_disk=frozenset({2, 3}),
    boundaries=Tier.HOST, to_disk=frozenset({1, 2, 3}), packed=True,
)  # fmt: skip
ACTIVATIONS = ("boundary", "kept")


def test_the_engine_takes_what_the_simulation_does_for_each_of_them(tmp_path: Path) -> None:
    """On the virtual clock, with the prices of a plan, the engine takes what the simulation does.

    State, gradients and weights move at one rate, activations at the other.
    """
    folder, recipe = build_tiny(tmp_path), Recipe(3, micro_batch_size=2)
    factory = folder_source(folder).factory
    structure, plan = plan_for(factory, recipe, EVERYTHING, (4, 32))
    assert plan.disk.packed and plan.weights_on_disk and plan.gradients_on_disk and plan.disk_activations
    layout = structure.layout()
    _, activations = discover(factory, plan.precision.working_dtype, plan.step.micro_batch_size, plan.step.seq_len)
    basis = CostBasis(structure, layout, work_of(structure), TYPICAL_CPU, True, 0, PACKED, PLAIN)
    assert basis.rates == replace(TYPICAL_CPU, disk_bytes_per_s=PACKED, disk_plain_bytes_per_s=PLAIN)
    prices = Prices(plan, basis, activations)
    result = train_engine(folder, tiny_batches(3), recipe, EVERYTHING, cost=prices)
    records = [record for of_step in result.records for record in of_step]
    for stage, is_activations, rate in (
        (Stage.DISK, True, PLAIN),
        (Stage.DISK, False, PACKED),
        (Stage.WEIGHTS, False, PACKED / 2),
    ):
        of = [r for r in records if r.stage is stage and (r.op.name in ACTIVATIONS) == is_activations]
        took_s, num_bytes = sum(r.end_s - r.start_s for r in of), sum(r.op.num_bytes for r in of)
        assert num_bytes > 0
        assert took_s == pytest.approx(num_bytes / rate)

    order = plan.visits(structure.without_backward)
    simulation = Simulation(plan, layout, order, residency_of(order, structure, layout, plan), prices)
    expected = [simulation.step() for _ in range(3)]
    for stage in (Stage.DISK, Stage.WEIGHTS):
        at_work = sum(r.end_s - r.start_s for r in records if r.stage is stage)
        assert sum(step.busy_s[stage] for step in expected) == pytest.approx(at_work)
