"""Freezing and groups as a user meets them: through the command line, real actors, saves, a resume and exports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain_ray.cli import main
from megatrain_ray.io.checkpoints.safetensors_folder import WeightFolder
from megatrain_ray.io.saves.manifest import read_manifest
from tests.support.in_process import Train
from tests.support.routers import build_with_fp32_router
from tests.support.runs import assert_equals_reference, config, write_config
from tests.support.tiny import build_tiny

FREEZE = ["embed_tokens", r"layers\.0\.", r"layers\.2\.mlp", "experts"]


def bf16_model(folder: Path) -> Path:
    """Write a model with routers in FP32 beside bf16."""
    build_with_fp32_router(folder, vocab_size=320, num_hidden_layers=3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def assert_frozen_bytes(model: Path, out: Path, dtype: torch.dtype) -> None:
    """Assert that frozen tensors are what they were, and all of `dtype`, except that routers are FP32 in any case."""
    before, after = WeightFolder.open(model), WeightFolder.open(out)
    assert before.names == after.names
    frozen = [n for n in before.names if any(re.search(pattern, n) for pattern in FREEZE)]
    assert len([name for name in frozen if name.endswith("mlp.gate.wg.weight")]) == 2
    for name in frozen:
        numel = torch.Size(before.shape(name)).numel()
        assert torch.equal(before.read(name, 0, numel), after.read(name, 0, numel)), name
    for name in before.names:
        assert after.dtype(name) is (torch.float32 if name.endswith("gate.wg.weight") else dtype)


def test_train_save_resume_and_export(tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Saves while training goes on; resumed by another number of shards; other patterns are refused.

    Routers in FP32, frozen and trained, are saved, restored and exported as such.
    """
    model, run_dir = bf16_model(tmp_path / "model"), tmp_path / "run"
    tree = config(
        run_dir,
        model,
        train__steps=3,
        train__precision="bf16",
        train__schedule="constant",
        train__freeze=FREEZE,
        train__groups=[{"match": "norm", "lr": 1e-2, "weight_decay": 0.3}, {"match": "q_proj", "lr": 1e-4}],
        save_every=1,
        hardware__num_shards=2,
    )
    first = train(str(write_config(tmp_path / "first.yaml", tree)))
    assert first.returncode == 0, first.stderr
    manifest = read_manifest(run_dir / "saves" / "step_3")
    embedding, block = manifest.layers[:2]
    assert (embedding.num_trained, block.num_trained) == (0, 0)
    assert {piece.layer for blob in manifest.blobs() if blob.kind == "m" for piece in blob.pieces} == {
        "layers.1", "layers.2", "head",
    }  # fmt: skip
    assert main(["train", str(tmp_path / "first.yaml"), "train.freeze=[embed_tokens]", "train.steps=5"]) == 2
    assert "train.freeze: [embed_tokens, " in capsys.readouterr().err
    tree["train"]["steps"], tree["hardware"]["num_shards"] = 5, 3
    second = train(str(write_config(tmp_path / "second.yaml", tree)))
    assert second.returncode == 0, second.stderr
    assert_equals_reference(run_dir, tree, tmp_path / "fp32")
    assert_frozen_bytes(model, tmp_path / "fp32", torch.float32)
    assert main(["export", str(run_dir), str(tmp_path / "bf16")]) == 0
    assert_frozen_bytes(model, tmp_path / "bf16", torch.bfloat16)
    assert main(["inspect", str(run_dir), "--verify"]) == 0
    assert "step 5: good" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "train.freeze=[lm_haed]",
            "train.freeze: 'lm_haed' matches no parameter of the model (30 of them); near it are lm_",
        ),
        (r"train.trainable=['layers\.9\.']", r"train.trainable: 'layers\\.9\\.' matches no parameter"),
        ("train.freeze=['(']", "train.freeze: '(' is no regular expression: missing ), unterminated subpattern"),
        ("train.freeze=[.]", "train.trainable and train.freeze leave no parameter to train; freeze less"),
        (
            "train.groups=[{match: norm, lr: 1e-5}, {match: model.norm, lr: 1e-4}]",
            "train.groups.1: every parameter that",
        ),
        ("train.groups=[{match: norm}]", "train.groups.0: no lr, weight_decay or optimizer; set one of them"),
        ("train.groups=[{match: norm, lrr: 1}]", "train.groups.0.lrr: unknown key; did you mean train.groups.lr?"),
        ("train.groups=[{lr: 1}]", "train.groups.0.match: required. A pattern of parameter names"),
        ("train.groups=[{match: norm, lr: 0}]", "train.groups.0.lr: expected greater than 0"),
    ],
)
def test_patterns_that_cannot_be_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, says: str
) -> None:
    path = write_config(tmp_path / "config.yaml", config(tmp_path / "run", build_tiny(tmp_path / "model")))
    assert main(["plan", str(path), override]) == 2
    assert says in capsys.readouterr().err


def test_the_plan_shows_what_freezing_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(
        tmp_path / "config.yaml",
        config(tmp_path / "run", build_tiny(tmp_path / "model"), train__precision="bf16", train__freeze=FREEZE[:3]),
    )
    assert main(["plan", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "of them trained; frozen wholly: embedding, layers.0; partly: layers.2" in shown
