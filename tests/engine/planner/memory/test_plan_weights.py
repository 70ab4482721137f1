"""Working copies on disk: of as few blocks as it takes where all state there is not enough; their bytes and time."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.measure.plan_traffic import moved_bytes
from megatrain_ray.engine.model.parameter_rules import ParameterRules
from megatrain_ray.engine.plan.plan_shards import shard_layout, spill_layout
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.limits import fits
from megatrain_ray.engine.planner.memory.host_bytes import host_memory_items
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.engine.planner.search.lower_bounds import Bounds
from megatrain_ray.engine.spill.disk_weights import DiskWeights, ShardFile
from megatrain_ray.engine.spill.spill_table import SpillTable
from tests.engine.planner.memory.test_plan_spill import (
    BLOCKS,
    CUDA,
    RATES,
    basis_of,
    chosen,
    gradient_bytes,
    needed_ram,
    planned,
    predicted,
    shape,
    state_bytes,
)
from tests.support.memory_store import MemoryStore


def without_state() -> int:
    """Return the most memory that may be missing, in steps, before a working copy must be on disk."""
    able = (missing for missing in STEPS_BEYOND if fits(plan := planned(missing)) and not plan.weights_on_disk)
    return max(able)


def weight_bytes(layer: int) -> int:
    return 2 * shape()[0].layout().layers[layer].size


STEPS_BEYOND = range(0, 20 * state_bytes(1), state_bytes(1) // 4)


def test_working_copies_of_the_last_blocks_spill_when_all_state_has() -> None:
    first, order = without_state(), [*range(BLOCKS, 0, -1)]
    plans = [planned(first + missing) for missing in range(0, 8 * weight_bytes(1), weight_bytes(1) // 2)]
    counts = [len(plan.weights_on_disk) for plan in plans]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert len(set(counts)) > 4
    for plan, count in zip(plans, counts, strict=True):
        assert fits(plan)
        assert plan.weights_on_disk == frozenset(order[:count])
        assert not count or len(plan.spilled_layers) == BLOCKS + 2
        assert plan.disk.num_upload_buffers == (2 if count else 0)
        if count:
            fewer = [replace(x, weights=Tier.HOST) if i == order[count - 1] else x for i, x in enumerate(plan.layers)]
            rows = host_memory_items(replace(plan, layers=tuple(fewer)), shape()[0].layout())
            assert sum(row.num_bytes for row in rows) > plan.limits.ram_bytes


def test_the_ends_and_what_is_frozen_in_part_keep_their_working_copies_in_memory() -> None:
    assert planned(1 << 40).weights_on_disk == frozenset(range(1, BLOCKS + 1))
    partly = planned(1 << 40, rules=ParameterRules(freeze=(r"layers\..*mlp",)))
    assert partly.spilled_layers and not partly.weights_on_disk


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_windows_take_no_more_than_is_counted(num_shards: int, precision: Precision) -> None:
    plan, layout = planned(1 << 40, num_shards=num_shards, precision=precision), shape()[0].layout()
    parts = [spill_layout(plan, shard_layout(plan, layout, k)) for k in range(num_shards)]
    files = [
        ShardFile(part, SpillTable(part, torch.zeros(part.memory_bytes, dtype=torch.uint8)), MemoryStore(), "")
        for part in parts
    ]
    taken = DiskWeights(plan, layout, files).memory.nbytes
    (counted,) = (row.num_bytes for row in plan.memory_items if row.name == "weight windows")
    largest = layout.layers[1].size * precision.working_dtype.itemsize
    assert 2 * largest <= taken <= counted <= taken + 2 * 4096 * 4 * num_shards


@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("clip", [True, False])
def test_reads_of_working_copies_are_priced(clip: bool, order: LoopOrder) -> None:
    """Those for uploads beside those for updates: a disk that does nothing else is at work all the time."""
    plan = planned(without_state() + 6 * weight_bytes(1), clip=clip, order=order)
    on_disk, structure = plan.weights_on_disk, shape()[0]
    assert len(on_disk) > 2
    moved = moved_bytes(plan, structure)["disk"]
    state = sum(map(state_bytes, plan.spilled_layers)) + sum(map(weight_bytes, on_disk))
    gradients = sum(gradient_bytes(plan, layer) for layer in plan.gradients_on_disk)
    reads = plan.disk.weight_read_bytes
    assert moved == 2 * (state + gradients) + reads
    sweeps = 1 if order is LoopOrder.LAYERS_OUTER else plan.step.num_micro_batches
    assert sweeps * sum(map(weight_bytes, on_disk)) < reads <= 2 * sweeps * sum(map(weight_bytes, on_disk))
    steps = []
    for rate in RATES:
        prediction, bounds = predicted(plan, rate), Bounds(plan, basis_of(rate), shape()[1])
        assert prediction.busy_s["disk"] == pytest.approx((moved - reads) / rate)
        assert bounds.disk_s == pytest.approx((moved - reads) / rate)
        assert prediction.step_s >= moved / rate * (1 - 1e-9)
        steps.append(prediction.step_s)
    assert all(slower * (1 + 1e-9) >= faster for slower, faster in itertools.pairwise(steps))
    slowest = predicted(plan, RATES[0])
    assert slowest.bottleneck == "disk"
    in_memory = planned(0, clip=clip, order=order)
    assert predicted(plan, math.inf).step_s == pytest.approx(predicted(in_memory, math.inf).step_s)


def test_a_plan_with_weights_on_disk_is_chosen_and_told() -> None:
    """Such a plan is chosen where the model was refused before."""
    least = replace(CUDA, ram_bytes=spare_and_all(CUDA))
    plan = chosen(least)
    assert plan.weights_on_disk
    told = describe(plan)
    assert f"on disk: state of 14 layers and weights of {len(plan.weights_on_disk)} layers; " in told
    assert f"weights   stream from the host, those of {len(plan.weights_on_disk)} layers from disk" in told


def spare_and_all(machine: Machine) -> int:
    """Host memory that is not enough with all state on disk, by two working copies."""
    return needed_ram(machine) - without_state() - 2 * weight_bytes(1)
