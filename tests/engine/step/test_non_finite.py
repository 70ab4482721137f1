"""A step whose gradient is not finite: skipped and counted with clipping, the end of the run without."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.batching.batch import Batch
from tests.support.reference import Recipe, train_reference
from tests.support.run_engine import Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

BAD_TOKEN = 200  # in no English text


def broken_model(folder: Path) -> Path:
    """Write a model whose embedding of one token overflows: every batch without that token is as good as before."""
    build_tiny(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD_TOKEN] = torch.finfo(torch.float32).max
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def batches_with_bad_token(steps: int, bad: set[int]) -> list[Batch]:
    batches = tiny_batches(steps)
    for i in bad:
        ids = batches[i].input_ids.clone()
        ids[2, 5] = BAD_TOKEN
        batches[i] = dataclasses.replace(batches[i], input_ids=ids)
    return batches


@pytest.mark.parametrize("hbm_layers", [frozenset(), frozenset({0, 2})], ids=["on the host", "on the device"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_clipped_step_is_skipped_and_the_rest_goes_on(
    tmp_path: Path, precision: str, hbm_layers: frozenset[int]
) -> None:
    """Weights, moments and AdamW's own count stay; step, schedule and data go on: as the reference, bit for bit."""
    folder = broken_model(tmp_path)
    batches = batches_with_bad_token(6, {0, 3})
    recipe = Recipe(6, precision=precision)
    ours = train_engine(folder, batches, recipe, Mode(num_shards=2, hbm_layers=hbm_layers))
    theirs = train_reference(folder, batches, recipe)
    assert [report.skipped for report in ours.reports] == theirs.skipped == [True, False, False, True, False, False]
    for mine, reference in zip(ours.losses, theirs.losses, strict=True):
        assert mine == reference or (mine != mine and reference != reference)
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name
    assert ours.exp_avg_sq.keys() == theirs.exp_avg_sq.keys()
    for name, v in theirs.exp_avg_sq.items():
        assert torch.equal(ours.exp_avg_sq[name], v), name
    assert ours.reports[3].bad_parameter == "model.embed_tokens.weight"
    assert ours.reports[1].bad_parameter is None


def test_without_clipping_the_run_ends_and_names_the_parameter(tmp_path: Path) -> None:
    folder = broken_model(tmp_path)
    recipe = Recipe(3, clip=None)
    with pytest.raises(MegatrainError, match=r"step 2: the gradient of model\.\S+ is not finite.*last save") as info:
        train_engine(folder, batches_with_bad_token(3, {1}), recipe, Mode())
    assert info.value.exit_code == 1
