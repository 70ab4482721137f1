"""What a save is predicted to cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain_ray.config import TrainConfig
from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.plan_request import Machine
from megatrain_ray.engine.save_cost import measure_copy, predict_stall_s
from megatrain_ray.planning import prepare
from tests.runs import config
from tests.tiny import build_tiny


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    machine = Machine(device="cpu", num_cpus=1, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=None)
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"), save_every=1)
    return prepare(TrainConfig.model_validate(tree).resolve(), machine).plan


def test_a_save_takes_twelve_bytes_per_parameter(plan: Plan) -> None:
    assert plan.save_bytes == 12 * sum(layer.num_parameters for layer in plan.layers)


def test_the_three_cases(plan: Plan) -> None:
    """In units in which the save is 12: the disk is fast enough; RAM takes the rest; the disk takes the rest."""
    unit = plan.save_bytes / 12
    roomy, tight = replace(plan, save_copy_bytes=plan.save_bytes), replace(plan, save_copy_bytes=int(4 * unit))
    assert predict_stall_s(roomy, 6.0, 2 * unit, 10 * unit) == 0
    assert predict_stall_s(roomy, 1.0, 2 * unit, 10 * unit) == pytest.approx(1.0)
    assert predict_stall_s(tight, 1.0, 2 * unit, 10 * unit) == pytest.approx(0.4 + 3.0)


def test_spare_ram_is_shared_with_nobody(plan: Plan) -> None:
    """A plan that leaves no RAM copies nothing; one that leaves much copies everything and no more."""
    assert plan.save_copy_bytes == plan.save_bytes


def test_copying_is_measured() -> None:
    assert 1e8 < measure_copy() < 1e13
