"""Muon: parity with torch.optim.Muon beside torch.optim.AdamW, over every way a step can run; and what it trains."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.optimizer import muon
from megatrain_ray.engine.optimizer.muon import LrAdjustment, newton_schulz
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.plan_groups import UpdateOrder
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.errors import ConfigError
from tests.engine.step.test_non_finite import batches_with_bad_token, broken_model
from tests.support.family_models import build_family, family_batches
from tests.support.reference import MuonRecipe, Own, Recipe, Result, train_reference
from tests.support.run_engine import EngineResult, Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

STEPS = 3
KEEP, RECOMPUTE = ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE
OUTER, LAYERS = LoopOrder.MICRO_BATCHES_OUTER, LoopOrder.LAYERS_OUTER
RECIPE = Recipe(STEPS, muon=MuonRecipe())
MATRICES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def run(
    folder: Path, recipe: Recipe, mode: Mode, *, tied: bool = False, num_layers: int = 3
) -> tuple[EngineResult, Result]:
    build_tiny(folder, tied=tied, num_layers=num_layers)
    batches = tiny_batches(recipe.steps)
    return train_engine(folder, batches, recipe, mode), train_reference(folder, batches, recipe)


def assert_equal(ours: EngineResult, theirs: Result) -> None:
    """Bit-equal; a second moment of what AdamW trains alone."""
    assert ours.losses == theirs.losses
    assert ours.grad_norms == theirs.grad_norms
    for mine, reference in (
        (ours.masters, theirs.masters), (ours.exp_avg, theirs.exp_avg), (ours.exp_avg_sq, theirs.exp_avg_sq),
    ):  # fmt: skip
        assert mine.keys() == reference.keys()
        assert [name for name, tensor in reference.items() if not torch.equal(mine[name], tensor)] == []
    assert theirs.exp_avg_sq.keys() < theirs.exp_avg.keys()


def by_muon(result: EngineResult) -> set[str]:
    return {name for name in result.exp_avg if name not in result.exp_avg_sq}


MODES = (
    (Mode(OUTER, KEEP), 4),
    (Mode(OUTER, RECOMPUTE, num_shards=2, num_fragments=3), 1),
    (Mode(LAYERS, KEEP, num_shards=3), 1),
    (Mode(LAYERS, RECOMPUTE, num_fragments=3), 2),
)


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize(("mode", "micro_batch_size"), MODES)
def test_fp32_is_bit_equal(tmp_path: Path, mode: Mode, micro_batch_size: int, clip: float | None) -> None:
    ours, theirs = run(tmp_path, replace(RECIPE, micro_batch_size=micro_batch_size, clip=clip), mode)
    assert clip is None or max(theirs.grad_norms) > clip, "clipping must bite"
    assert_equal(ours, theirs)
    assert {name.split(".")[-2] for name in by_muon(ours)} == MATRICES
    assert len(by_muon(ours)) == 3 * len(MATRICES)


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize(("grad_dtype", "micro_batch_size"), [("fp32", 4), ("fp32", 1), ("bf16", 1)])
def test_bf16_is_bit_equal(tmp_path: Path, clip: float | None, grad_dtype: str, micro_batch_size: int) -> None:
    recipe = replace(
        RECIPE, precision="bf16", grad_dtype=grad_dtype, micro_batch_size=micro_batch_size, clip=clip,
        loss_chunk_tokens=24 if micro_batch_size == 4 else None,
    )  # fmt: skip
    order = LAYERS if micro_batch_size == 4 or clip else OUTER
    assert_equal(*run(tmp_path, recipe, Mode(order, RECOMPUTE, num_shards=3), tied=True))


@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", [1.0, None])
def test_sums_that_wait_on_the_host_are_bit_equal(tmp_path: Path, clip: float | None, grad_dtype: str) -> None:
    recipe = replace(RECIPE, precision="bf16", clip=clip, grad_dtype=grad_dtype)
    assert_equal(*run(tmp_path, recipe, Mode(OUTER, RECOMPUTE, num_shards=2, sums=Tier.HOST)))


@pytest.mark.parametrize("clip", [1.0, None])
def test_more_layers_than_directions_that_may_wait(tmp_path: Path, clip: float | None) -> None:
    ours, theirs = run(tmp_path, replace(RECIPE, clip=clip), Mode(LAYERS, num_shards=2), num_layers=7)
    (size,) = {*ours.plan.slots.direction_bytes}
    assert ours.plan.gradients.direction_slab_bytes == 4 * size
    assert_equal(ours, theirs)


NUMBERS = [
    MuonRecipe(momentum=0.3),
    MuonRecipe(momentum=0.0, nesterov=False),
    MuonRecipe(nesterov=False, ns_steps=3),
    MuonRecipe(ns_steps=7, adjust_lr="original"),
]


@pytest.mark.spread(2)
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_other_numbers_are_bit_equal(tmp_path: Path, numbers: MuonRecipe) -> None:
    recipe = replace(RECIPE, steps=3, muon=numbers, precision="bf16")
    ours, theirs = run(tmp_path, recipe, Mode(LAYERS, num_shards=2))
    assert_equal(ours, theirs)
    assert train_reference(tmp_path, tiny_batches(3), replace(RECIPE, precision="bf16")).losses != theirs.losses


@pytest.mark.parametrize("clip", [0.5, None])
def test_groups_and_frozen_parameters_are_bit_equal(tmp_path: Path, clip: float | None) -> None:
    """Both optimizers where a group puts them, learning rates and decays of a group's own, whole blocks of AdamW's."""
    groups = (
        Own(r"layers\.0\.mlp", lr=1e-4, weight_decay=0.5),
        Own("k_proj", muon=False),
        Own("embed_tokens", muon=True, lr=3e-3),
        Own(r"layers\.1\.", muon=False, weight_decay=0.0),
    )
    recipe = replace(RECIPE, groups=groups, freeze=(r"2\.self_attn\.q_proj", "lm_head"), clip=clip)
    ours, theirs = run(tmp_path, recipe, Mode(LAYERS, num_shards=2))
    assert_equal(ours, theirs)
    assert "model.embed_tokens.weight" in by_muon(ours)
    assert not [name for name in by_muon(ours) if "k_proj" in name or "layers.1." in name or "2.self_attn.q" in name]
    others = [replace(recipe, groups=groups[:k] + groups[k + 1 :]) for k in range(len(groups))]
    assert all(train_reference(tmp_path, tiny_batches(STEPS), r).losses != theirs.losses for r in others)


FAMILIES = ["GPT-2", "Mixtral", "Qwen3-MoE", "GPT-OSS", "DeepSeek-V3", "Zamba2"]


@pytest.mark.spread(3)
@pytest.mark.parametrize(("name", "clip"), zip(FAMILIES, itertools.cycle([1.0, None]), strict=False))
def test_families_are_bit_equal(tmp_path: Path, name: str, clip: float | None) -> None:
    """Experts' matrices one by one; no convolution, table or stack of biases; weights that layers share once."""
    folder = build_family(name, tmp_path)
    batches = family_batches(3)
    recipe = Recipe(3, muon=MuonRecipe(), clip=clip, seed=3)
    mode = Mode(LAYERS, RECOMPUTE, num_shards=2)
    ours, theirs = train_engine(folder, batches, recipe, mode), train_reference(folder, batches, recipe)
    assert_equal(ours, theirs)
    shapes = {name: ours.masters[name].shape for name in by_muon(ours)}
    assert {len(shape) for shape in shapes.values()} <= {2, 3}
    assert not any("bias" in name or "conv" in name or "wte" in name for name in shapes)
    if name in ("Mixtral", "Qwen3-MoE", "GPT-OSS", "DeepSeek-V3"):
        assert 3 in {len(shape) for shape in shapes.values()} or any("experts" in name for name in shapes)


def test_a_skipped_step_changes_nothing(tmp_path: Path) -> None:
    folder, batches = broken_model(tmp_path), batches_with_bad_token(4, {0, 2})
    recipe = replace(RECIPE, precision="bf16")
    ours = train_engine(folder, batches, recipe, Mode(num_shards=2))
    theirs = train_reference(folder, batches, recipe)
    assert [report.skipped for report in ours.reports] == theirs.skipped == [True, False, True, False]
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name
        assert torch.equal(ours.exp_avg[name], theirs.exp_avg[name]), name


@pytest.mark.parametrize(("clip", "up"), [(1.0, ("fetch", "momentum")), (None, ("momentum",))])
def test_what_moves_for_it(tmp_path: Path, clip: float | None, up: tuple[str, ...]) -> None:
    """Once a step and layer: with clipping the gradient comes back; without, directions are made in the backward."""
    ours, _ = run(tmp_path, replace(RECIPE, steps=1, clip=clip), Mode(LAYERS, num_shards=2))
    records = ours.records[0]
    count = Counter(r.op.name for r in records)
    num_shards, blocks = 2, 3
    assert {name: count[name] for name in ("fetch", "momentum", "complete", "orthogonalize")} == {
        "fetch": blocks if "fetch" in up else 0,
        "momentum": num_shards * blocks,
        "complete": blocks,
        "orthogonalize": blocks,
    }
    order = [r.op.layer for r in records if r.op.name == "orthogonalize"]
    assert order == ([1, 2, 3] if ours.plan.step.update_order is UpdateOrder.FORWARD else [3, 2, 1])
    backward_ends = max(r.end_s for r in records if r.op.name == "backward")
    first = min(r.start_s for r in records if r.op.name == "orthogonalize")
    assert (first >= backward_ends) is (clip is not None)


def test_a_wrong_bit_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "C", muon.C * (1 + 1e-3))
    with pytest.raises(AssertionError):
        assert_equal(*run(tmp_path, RECIPE, Mode()))


@pytest.mark.parametrize("shape", [(64, 64), (33, 129), (129, 33), (1, 7), (7, 1)])
def test_newton_schulz_is_torchs(shape: tuple[int, int]) -> None:
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = _zeropower_via_newtonschulz(update, (muon.A, muon.B, muon.C), 5, muon.EPS)
    ours = newton_schulz(update, 5)
    assert torch.equal(ours, theirs)
    assert torch.linalg.svdvals(ours.float()).median() == pytest.approx(0.95, abs=0.3)
    assert not newton_schulz(torch.zeros(shape), 5).any()


@pytest.mark.parametrize("adjustment", LrAdjustment)
@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (5, 32, 8)])
def test_learning_rates_by_shape_are_torchs(adjustment: LrAdjustment, shape: tuple[int, ...]) -> None:
    assert 0.1 * adjustment.ratio(shape) == _adjust_lr(0.1, adjustment.value, torch.Size(shape[-2:]))


def test_a_small_model_learns(tmp_path: Path) -> None:
    """The quality check, by the matrices of the blocks alone: embedding, head and norms stay as they are."""
    build_tiny(tmp_path)
    recipe = Recipe(30, muon=MuonRecipe(), lr=3e-3, trainable=("proj",), schedule="constant")
    ours = train_engine(tmp_path, tiny_batches(4) * 8, recipe, Mode())
    assert not ours.exp_avg_sq
    assert sum(ours.losses[-4:]) < sum(ours.losses[:4]) - 4 * 1.0


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (replace(RECIPE, freeze=("proj",)), "train.optimizer: muon has no matrix of the model's layers to train"),
        (replace(RECIPE, groups=(Own("proj", muon=False),)), "muon has no matrix"),
        (replace(RECIPE, groups=(Own("norm", muon=True),)), "input_layernorm.weight has 1 dimensions; match less"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, recipe: Recipe, says: str) -> None:
    build_tiny(tmp_path)
    with pytest.raises(ConfigError, match=says):
        train_engine(tmp_path, tiny_batches(1), recipe, Mode())
