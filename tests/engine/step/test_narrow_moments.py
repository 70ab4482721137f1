"""train.moments: bf16 in whole steps: the bits of a reference that rounds the same, however a step runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.optimizer import update_kernel
from megatrain_ray.engine.optimizer.torch_kernel import TorchBlocks
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from tests.support.reference import Recipe, Result, train_reference
from tests.support.run_engine import EngineResult, Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

STEPS = 4
LAYERS = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, num_shards=3, num_fragments=3)
MODES = {
    "one shard": Mode(),
    "three shards": LAYERS,
    "on disk": Mode(num_shards=2, spilled=frozenset({0, 1, 2, 3, 4})),
    "some on the device": Mode(num_shards=2, hbm_layers=frozenset({0, 2})),
    "all on the device": Mode(hbm_layers=frozenset(range(5))),
}


def assert_equal(ours: EngineResult, theirs: Result) -> None:
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    for kind in ("masters", "exp_avg", "exp_avg_sq"):
        got, want = getattr(ours, kind), getattr(theirs, kind)
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], tensor), f"{kind} of {name}"


@pytest.mark.parametrize(
    ("mode", "precision"),
    [*((name, "bf16") for name in MODES), ("three shards", "fp32"), ("some on the device", "fp32")],
)
def test_same_bits_as_a_reference_that_rounds(tmp_path: Path, mode: str, precision: str) -> None:
    build_tiny(tmp_path)
    recipe = Recipe(STEPS, precision=precision, moments="bf16", micro_batch_size=2, seed=7)
    ours = train_engine(tmp_path, tiny_batches(STEPS), recipe, MODES[mode])
    assert_equal(ours, train_reference(tmp_path, tiny_batches(STEPS), recipe))
    assert ours.plan.precision.element_bytes == 8
    assert next(iter(ours.exp_avg.values())).dtype == torch.bfloat16


def test_without_clipping_frozen_and_in_torch_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that runs where no compiler is; what is frozen has no moments and shifts nobody's bits."""
    build_tiny(tmp_path, tied=True)
    recipe = Recipe(STEPS, moments="bf16", clip=None, freeze=(r"layers\.1\.", "norm"))
    native = train_engine(tmp_path, tiny_batches(STEPS), recipe, LAYERS)
    assert_equal(native, train_reference(tmp_path, tiny_batches(STEPS), recipe))
    monkeypatch.setattr(update_kernel, "_proven", lambda hyper, candidates: TorchBlocks)
    assert_equal(train_engine(tmp_path, tiny_batches(STEPS), recipe, Mode()), as_result(native))


@pytest.mark.parametrize("change", [{"moments": "fp32"}, {"seed": 8}], ids=["fp32 moments", "another seed"])
def test_other_numbers_would_be_seen(tmp_path: Path, change: dict[str, str | int]) -> None:
    build_tiny(tmp_path)
    recipe = Recipe(STEPS, moments="bf16", seed=7)
    ours = train_engine(tmp_path, tiny_batches(STEPS), recipe, Mode())
    theirs = train_reference(tmp_path, tiny_batches(STEPS), dataclasses.replace(recipe, **change))  # type: ignore[arg-type]
    assert ours.losses[:2] == theirs.losses[:2], "the first update is made of moments that were not rounded yet"
    assert ours.losses != theirs.losses
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)


def as_result(ours: EngineResult) -> Result:
    return Result(STEPS, STEPS, ours.masters, ours.exp_avg, ours.exp_avg_sq, ours.losses, ours.grad_norms)
