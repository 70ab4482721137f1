"""What a save is predicted to cost."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.measure.save_cost import measure_copy, predict_stall_s
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.engine.shards.snapshot_buffers import SnapshotBuffers
from megatrain_ray.planning.run_spec import prepare
from tests.support.runs import config
from tests.support.shards import open_shards
from tests.support.tiny import build_tiny


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    machine = Machine(device="cpu", num_cpus=1, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=None)
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"), save_every=1)
    return prepare(TrainConfig.model_validate(tree).resolve(), machine).plan


def test_a_save_takes_twelve_bytes_per_parameter(plan: Plan) -> None:
    assert plan.save_bytes == 12 * sum(layer.num_parameters for layer in plan.layers)


def test_the_three_cases(plan: Plan) -> None:
    """In units in which the save is 12, the disk is fast enough, or RAM takes the rest, or the disk takes the rest."""
    unit = plan.save_bytes / 12
    roomy, tight = (
        replace(plan, saves=replace(plan.saves, copy_bytes=plan.save_bytes)),
        replace(plan, saves=replace(plan.saves, copy_bytes=int(4 * unit))),
    )
    assert predict_stall_s(roomy, 6.0, 2 * unit, 10 * unit) == 0
    assert predict_stall_s(roomy, 1.0, 2 * unit, 10 * unit) == pytest.approx(1.0)
    assert predict_stall_s(tight, 1.0, 2 * unit, 10 * unit) == pytest.approx(0.4 + 3.0)


def test_spare_ram_is_shared_with_nobody(plan: Plan) -> None:
    """A plan that leaves no RAM copies nothing; one that leaves much copies everything and no more."""
    assert plan.saves.copy_bytes == plan.save_bytes


@pytest.mark.parametrize("num_layers", [1, 3])
def test_copying_is_measured_where_there_is_room(num_layers: int) -> None:
    """The smallest layer has room, or three have; the room is free again for a save, and copying changed nothing."""
    with open_shards(Precision.BF16, 1) as shards:
        (shard,) = shards.shards
        layer_bytes = sorted(shard.copy_bytes(layer) for layer in range(len(shard.layout.spans)))[:num_layers]
        before = shards.all_bytes()
        with closing(SnapshotBuffers(layer_bytes, 1 << 30)) as spare:
            assert 0 < measure_copy(shard, spare) < 1e13
            assert all(spare.take(num_bytes) is not None for num_bytes in layer_bytes)
            assert measure_copy(shard, spare) == math.inf, "no room is left"
        assert all(torch.equal(a, b) for a, b in zip(before, shards.all_bytes(), strict=True))


def test_nothing_is_copied_where_there_is_no_room(plan: Plan) -> None:
    none = replace(plan, saves=replace(plan.saves, copy_bytes=0))
    assert predict_stall_s(none, 1.0, plan.save_bytes / 4, math.inf) == pytest.approx(3.0)
