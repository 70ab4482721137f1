"""What is on disk comes back to every device that is here as what left it: CPU always, CUDA where there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.virtual_clock import Stage
from tests.support.device_builders import MAKERS, Make
from tests.support.reference import Recipe
from tests.support.run_engine import EngineResult, Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

STEPS = 3
EVERY, BLOCKS = frozenset(range(7)), frozenset(range(1, 6))
WEIGHTS = Mode(num_shards=2, stored=EVERY, spilled=EVERY, on_disk=BLOCKS)
ACTIVATIONS = Mode(boundaries=Tier.HOST, kept=Tier.HOST, to_disk=EVERY)
SOME = replace(
    ACTIVATIONS, num_shards=2, hbm_layers=frozenset({0, 2}), stored=EVERY - {0, 2}, spilled=EVERY - {0, 2},
    on_disk=BLOCKS - {2},
)  # fmt: skip


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


@pytest.mark.spread(2)
@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize(
    ("precision", "mode"),
    [
        pytest.param("bf16", Mode(num_shards=2, stored=EVERY), id="gradients"),
        pytest.param("bf16", WEIGHTS, id="weights"),
        pytest.param("bf16", replace(WEIGHTS, num_fragments=3), id="fragments"),
        pytest.param("bf16", replace(WEIGHTS, packed=True), id="packed"),
        pytest.param("bf16", ACTIVATIONS, id="activations"),
        pytest.param("bf16", SOME, id="all, beside layers on the device"),
        pytest.param("fp32", SOME, id="the same in fp32"),
    ],
)
def test_what_is_on_disk_changes_no_bit(
    tmp_path: Path, make: Make, precision: str, mode: Mode, order: LoopOrder
) -> None:
    """The engine is in poison mode: slots, slabs and windows that were released hold NaN."""
    build_tiny(tmp_path, num_layers=5)
    recipe = Recipe(STEPS, precision=precision, micro_batch_size=2)
    mode = replace(mode, order=order)
    in_memory = Mode(order, num_shards=mode.num_shards, hbm_layers=mode.hbm_layers, num_fragments=mode.num_fragments)
    ours, theirs = (
        train_engine(tmp_path, tiny_batches(STEPS), recipe, each, make_device=make) for each in (mode, in_memory)
    )
    check_that_it_ran(ours, mode)
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name
        assert torch.equal(ours.exp_avg[name], theirs.exp_avg[name]), name
        assert torch.equal(ours.exp_avg_sq[name], theirs.exp_avg_sq[name]), name


def check_that_it_ran(result: EngineResult, mode: Mode) -> None:
    """Assert from plan and event log that what the mode has on disk went there and came back."""
    plan, sizes = result.plan, result.layout.trained_sizes
    assert set(plan.spilled_layers) == mode.spilled
    assert set(plan.gradients_on_disk) == mode.stored
    assert set(plan.weights_on_disk) == mode.on_disk
    stored = sum(sizes[i] for i in mode.stored) * plan.gradients.offload_dtype.itemsize
    assert result.moved("store") == STEPS * stored
    state = sum(sizes[i] for i in mode.spilled) * plan.precision.state_bytes
    weights = sum(sizes[i] for i in mode.on_disk) * plan.precision.working_dtype.itemsize
    assert result.moved("write") == STEPS * (state + weights)
    blocks_to_disk = mode.to_disk & BLOCKS
    assert {i for i, layer in enumerate(plan.layers) if layer.disk_activations} == blocks_to_disk
    moved = [r.op for r in result.records[-1] if r.op.name in ("boundary", "kept") and r.stage is Stage.DISK]
    assert {op.layer for op in moved} == blocks_to_disk
