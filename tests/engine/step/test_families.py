"""Parity with the reference for one model of each family over five steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.model.architecture import Architecture
from tests.support.families import FAMILIES, SIZES
from tests.support.family_models import build_family, family_batches
from tests.support.reference import Recipe, Result, train_reference
from tests.support.run_engine import EngineResult, Mode, train_engine

STEPS = 3
# The other way to run a step: recomputed, cut, sharded, with what enters layers on the host where nobody else reads it.
LAYERS = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_shards=2, num_fragments=3, boundaries=Tier.HOST)


def run(name: str, folder: Path, recipe: Recipe, mode: Mode) -> tuple[EngineResult, Result]:
    build_family(name, folder)
    batches = family_batches(recipe.steps)
    ours = train_engine(folder, batches, recipe, mode)
    theirs = train_reference(folder, batches, recipe, frozen=FAMILIES[name].frozen)
    assert ours.masters.keys() == theirs.masters.keys()
    return ours, theirs


def assert_equal(ours: EngineResult, theirs: Result) -> None:
    assert ours.losses == theirs.losses
    assert ours.grad_norms == theirs.grad_norms
    assert [name for name, m in theirs.masters.items() if not torch.equal(ours.masters[name], m)] == []
    assert [name for name, m in theirs.exp_avg.items() if not torch.equal(ours.exp_avg[name], m)] == []


@pytest.mark.spread(9)
@pytest.mark.parametrize("name", FAMILIES)
def test_fp32_is_bit_equal(tmp_path: Path, name: str) -> None:
    recipe = Recipe(STEPS, micro_batch_size=2, seed=3)
    assert_equal(*run(name, tmp_path, recipe, Mode()))


@pytest.mark.spread(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_with_layers_outermost_is_bit_equal(tmp_path: Path, name: str) -> None:
    recipe = Recipe(STEPS, micro_batch_size=2, precision="bf16", seed=3)
    assert_equal(*run(name, tmp_path, recipe, LAYERS))


def test_a_model_that_asks_a_layer_for_its_device(tmp_path: Path) -> None:
    """Llama 4 moves token ids to the device of its embedding's weight, which is in a slot, not in the model."""
    config = {
        "model_type": "llama4_text", **SIZES, "intermediate_size_mlp": 48, "num_local_experts": 4,
        "num_experts_per_tok": 1, "head_dim": 8, "attention_chunk_size": 8, "interleave_moe_layer_step": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    Architecture(config)(torch.float32).save_pretrained(tmp_path)
    batches, recipe = family_batches(2), Recipe(2, micro_batch_size=2, seed=3)
    assert_equal(train_engine(tmp_path, batches, recipe, Mode()), train_reference(tmp_path, batches, recipe))
