"""Layers that live on the device: the same bits as everywhere, and no byte of theirs over the bus."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.shards.device_shard import DeviceShard
from tests.support.recipes import adamw_constants
from tests.support.reference import Own, Recipe, train_reference
from tests.support.run_engine import EngineResult, Mode, folder_source, plan_for, train_engine
from tests.support.tiny import build_tiny, tiny_batches

STEPS = 3
SOME, ALL = frozenset({0, 2}), frozenset(range(5))
LAYERS = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_shards=2, num_fragments=3)


def assert_equal(folder: Path, recipe: Recipe, mode: Mode) -> EngineResult:
    ours = train_engine(folder, tiny_batches(STEPS), recipe, mode)
    theirs = train_reference(folder, tiny_batches(STEPS), recipe)
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name
        assert torch.equal(ours.exp_avg_sq[name], theirs.exp_avg_sq[name]), name
    return ours


@pytest.mark.parametrize("hbm_layers", [SOME, ALL], ids=["some", "all"])
@pytest.mark.parametrize("clip", [1.0, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize(("precision", "tied"), [("fp32", True), ("bf16", False)])
def test_same_bits(tmp_path: Path, precision: str, tied: bool, clip: float | None, hbm_layers: frozenset[int]) -> None:
    build_tiny(tmp_path, tied=tied)
    recipe = Recipe(STEPS, precision=precision, clip=clip, micro_batch_size=2)
    ours = assert_equal(tmp_path, recipe, Mode(hbm_layers=hbm_layers))
    on_host = [i for i in range(5) if i not in hbm_layers]
    loaded = {r.op.layer for records in ours.records for r in records if r.op.name in ("load", "offload")}
    assert loaded == set(on_host)
    assert ours.count("update") == 5 * STEPS


@pytest.mark.parametrize("mode", [LAYERS, Mode(sums=Tier.HOST)], ids=["layers outer", "sums on the host"])
@pytest.mark.parametrize(("grad_dtype", "tied", "hbm_layers"), [("fp32", True, SOME), ("bf16", False, ALL)])
def test_same_bits_in_other_orders(
    tmp_path: Path, mode: Mode, grad_dtype: str, tied: bool, hbm_layers: frozenset[int]
) -> None:
    """Untied, chunks of the loss add to the head's sum, wherever that waits."""
    build_tiny(tmp_path, tied=tied)
    recipe = Recipe(
        STEPS, precision="bf16", micro_batch_size=2, grad_dtype=grad_dtype, loss_chunk_tokens=None if tied else 24
    )
    ours = assert_equal(tmp_path, recipe, Mode(**{**vars(mode), "hbm_layers": hbm_layers}))
    fetched = {r.op.layer for records in ours.records for r in records if r.op.name == "fetch"}
    assert fetched == (set(range(5)) if mode.sums is Tier.HOST else set()), "sums of layers on the device move, too"


@pytest.mark.parametrize("hbm_layers", [SOME, ALL], ids=["some", "all"])
def test_frozen_layers(tmp_path: Path, hbm_layers: frozenset[int]) -> None:
    """What is frozen has a working copy alone there, too."""
    build_tiny(tmp_path, tied=False)
    recipe = Recipe(
        STEPS, precision="bf16", micro_batch_size=2, freeze=("embed_tokens", r"layers\.0\.mlp", "layers.1.")
    )
    ours = assert_equal(tmp_path, recipe, Mode(hbm_layers=hbm_layers))
    assert ours.frozen.keys() & {"model.embed_tokens.weight"}


def test_neighbours_that_are_updated_alike_are_one_part(tmp_path: Path) -> None:
    """Vectors of 64 elements end in padding; a group of its own and what nobody adjoins are parts of their own."""
    source, alike = folder_source(build_tiny(tmp_path)), Recipe(1, precision="bf16")
    grouped = replace(alike, groups=(Own(r"self_attn\.k_proj", weight_decay=0.5),))

    def lengths(recipe: Recipe) -> list[int]:
        structure, plan = plan_for(source.factory, recipe, Mode(hbm_layers=ALL), (4, 32))
        shard = DeviceShard(plan, structure.layout(), CpuDevice(), adamw_constants(recipe))
        shard.load(source.weights())
        parts = shard._parts[1]
        assert [part.gradient_start % 128 for part in parts] == [0] * len(parts)
        return [part.length for part in parts]

    q, k, mlp = 64 * 64, 32 * 64, 176 * 64
    assert lengths(alike) == [2 * q + 2 * k + 3 * mlp, 64, 64]
    assert lengths(grouped) == [q, k, k + q + 3 * mlp, 64, 64]
