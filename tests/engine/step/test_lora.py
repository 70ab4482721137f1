"""LoRA: parity with the peft library, which puts its pairs into the same model for plain PyTorch to train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from tests.support.adapters import build_adapter
from tests.support.families import FAMILIES as ALL_FAMILIES
from tests.support.family_models import build_family, family_batches
from tests.support.pair_losses import Preference
from tests.support.pairs import pair_batches, random_pairs, referenced
from tests.support.reference import MuonRecipe, Own, Recipe, Result, train_reference
from tests.support.run_engine import EngineResult, Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

pytestmark = pytest.mark.pairwise

STEPS = 10
KEEP, RECOMPUTE = ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE
OUTER, LAYERS = LoopOrder.MICRO_BATCHES_OUTER, LoopOrder.LAYERS_OUTER
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODES = {
    "outer": Mode(OUTER, KEEP, num_shards=2, num_fragments=3),
    "layers": Mode(LAYERS, KEEP, num_shards=3),
    "recomputed": Mode(LAYERS, RECOMPUTE),
    "kept on the host": Mode(LAYERS, KEEP, boundaries=Tier.HOST, kept=Tier.HOST),
    "on the host": Mode(OUTER, RECOMPUTE, num_shards=2, sums=Tier.HOST),
}


def assert_equal(ours: EngineResult, theirs: Result) -> None:
    assert ours.losses == theirs.losses
    assert ours.grad_norms == theirs.grad_norms
    assert ours.masters.keys() == theirs.masters.keys()
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name
        assert torch.equal(ours.exp_avg[name], theirs.exp_avg[name]), name
    assert ours.exp_avg_sq.keys() == theirs.exp_avg_sq.keys()
    for name, v in theirs.exp_avg_sq.items():
        assert torch.equal(ours.exp_avg_sq[name], v), name


def run(
    folder: Path, recipe: Recipe, mode: Mode, targets: tuple[str, ...] = ALL, *, tied: bool = False, dropout: float = 0
) -> tuple[EngineResult, Result]:
    model = build_tiny(folder / "model", tied=tied)
    recipe = replace(recipe, adapter=build_adapter(folder / "adapter", model, targets, dropout=dropout))
    batches = tiny_batches(recipe.steps)
    return train_engine(model, batches, recipe, mode), train_reference(model, batches, recipe)


@pytest.mark.spread(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ten_steps_are_those_of_peft(tmp_path: Path, mode: str, precision: str) -> None:
    """Four micro-batches of one sequence, every matrix of the blocks."""
    ours, theirs = run(tmp_path, Recipe(STEPS, precision=precision, clip=0.5), MODES[mode])
    assert max(theirs.grad_norms) > 0.5, "clipping must bite"
    assert len(ours.masters) == 3 * len(ALL) * 2
    assert_equal(ours, theirs)


@pytest.mark.parametrize("mode", ["layers", "on the host"])
def test_with_dropout_and_a_tied_head(tmp_path: Path, mode: str) -> None:
    recipe = Recipe(3, precision="bf16", seed=3, grad_dtype="bf16", loss_chunk_tokens=24)
    ours, theirs = run(tmp_path, recipe, MODES[mode], ("q_proj", "down_proj"), tied=True, dropout=0.1)
    assert_equal(ours, theirs)
    plain = replace(recipe, adapter=build_adapter(tmp_path / "plain", tmp_path / "model", ("q_proj", "down_proj")))
    assert train_reference(tmp_path / "model", tiny_batches(3), plain).losses != theirs.losses, "dropout dropped"


def test_preferences_without_clipping(tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "model")
    batches = referenced(tmp_path / "reference", pair_batches(random_pairs(12), 3, packing=True))
    adapter = build_adapter(tmp_path / "adapter", model, ALL)
    recipe = Recipe(3, clip=None, adapter=adapter, preference=Preference("dpo", 0.5), micro_batch_size=2)
    assert_equal(train_engine(model, batches, recipe, MODES["layers"]), train_reference(model, batches, recipe))


@pytest.mark.parametrize("mode", ["outer", "recomputed"])
def test_with_parameters_beside_and_groups_of_their_own(tmp_path: Path, mode: str) -> None:
    """Norms and an embedding are trained with the pairs; B has a larger learning rate, as in LoRA+."""
    own = (Own(r"lora_B", lr=1e-2, weight_decay=0.0), Own("norm", lr=1e-4))
    recipe = Recipe(3, trainable=("norm", "embed_tokens"), groups=own, clip=None)
    ours, theirs = run(tmp_path, recipe, MODES[mode], ("o_proj", "model.layers.1.mlp.up_proj"))
    assert len(ours.masters) == 2 * (3 + 1) + 7 + 1
    assert_equal(ours, theirs)


@pytest.mark.parametrize(("precision", "clip"), [("fp32", 1.0), ("bf16", None)])
def test_pairs_that_muon_trains(tmp_path: Path, precision: str, clip: float | None) -> None:
    """They are matrices of the layers: each one by itself, and AdamW has what is beside them, or nothing."""
    beside = () if clip else ("norm",)
    recipe = Recipe(3, muon=MuonRecipe(), precision=precision, clip=clip, trainable=beside)
    ours, theirs = run(tmp_path, recipe, MODES["layers"])
    assert len(ours.exp_avg_sq) == 7 * len(beside)
    assert_equal(ours, theirs)


def test_muon_and_adamw_share_a_pair(tmp_path: Path) -> None:
    """B is AdamW's; A and the tied embedding are Muon's. Unclipped, with sums that wait on the host."""
    own = (Own("embed_tokens", muon=True), Own("lora_B", muon=False, lr=1e-2))
    recipe = Recipe(3, trainable=("embed_tokens",), groups=own, clip=None, muon=MuonRecipe())
    ours, theirs = run(tmp_path, recipe, MODES["on the host"], ("q_proj",), tied=True)
    assert {name.rpartition("lora_")[2] for name in theirs.exp_avg_sq} == {"B.weight"}
    assert_equal(ours, theirs)


def test_a_pair_beside_the_head(tmp_path: Path) -> None:
    """Its gradients come from the loss, block or none below it."""
    ours, theirs = run(tmp_path, Recipe(3, micro_batch_size=2), MODES["layers"], ("lm_head",))
    assert ours.plan.layer_order == (4,)
    assert_equal(ours, theirs)


FAMILIES = {
    "GPT-2": ("c_attn", "c_proj", "c_fc"),  # Conv1D, whose matrix is [in, out]; dropout around
    "Phi-3": ("qkv_proj", "gate_up_proj"),
    "Falcon, ALiBi": ("query_key_value", "dense_4h_to_h"),  # a linear module of the model's own
    "Gemma 2": ("q_proj", "v_proj"),
    "Qwen3-MoE": ("q_proj", "o_proj"),  # beside experts and a router's loss
    "DeepSeek-V3": ("q_a_proj", "kv_b_proj", "kv_a_proj_with_mqa"),
    "Qwen3-Next": ("in_proj_qkvz", "o_proj"),
    "Gemma 3, vision-language": (r"language_model.layers.1.self_attn.q_proj", "down_proj"),
}


@pytest.mark.spread(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_families_are_bit_equal(tmp_path: Path, family: str, precision: str) -> None:
    model = build_family(family, tmp_path / "model")
    adapter = build_adapter(tmp_path / "adapter", model, FAMILIES[family], dropout=0.1)
    recipe, batches = Recipe(3, precision=precision, adapter=adapter), family_batches(3)
    theirs = train_reference(model, batches, recipe, frozen=ALL_FAMILIES[family].frozen)
    assert_equal(train_engine(model, batches, recipe, MODES["layers"]), theirs)
