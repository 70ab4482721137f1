"""train.moments as a user meets it: the command line says what it is; saves of either type resume as the other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatrain_ray.cli import main
from megatrain_ray.engine.layout.precision import NARROW_MOMENTS
from megatrain_ray.io.saves.manifest import read_manifest
from tests.support.in_process import Train
from tests.support.reference import Result, train_reference
from tests.support.runs import config, exported_masters, losses, recipe_of, write_config
from tests.support.tiny import build_tiny, text_batches

# Updates, moments, what else changes, and what is told of the save's moments.
PARTS = [
    (2, "bf16", ("hardware.num_shards=2",), None),
    (3, "bf16", ("hardware.num_shards=3",), None),
    (4, "fp32", (), "the save's moments are bf16: from here on they are fp32, converted exactly"),
    (5, "bf16", ("hardware.hbm_layers=2",), "moments are fp32: from here on they are bf16, converted to nearest"),
]


def test_train_resume_as_the_other_type_and_export(tmp_path: Path, train: Train) -> None:
    """Four starts of one run; losses and masters of a reference that converts as they do."""
    model, run_dir = build_tiny(tmp_path / "model", num_layers=2), tmp_path / "run"
    settings = {"train__precision": "bf16", "train__schedule": "constant", "train__seed": 3}
    tree = config(run_dir, model, save_every=0, **settings)
    path, batches = str(write_config(tmp_path / "config.yaml", tree)), text_batches(5, 4, 32)
    theirs: Result | None = None
    their_losses: list[float] = []
    for steps, moments, overrides, told in PARTS:
        done = train(path, f"train.steps={steps}", f"train.moments={moments}", *overrides)
        assert done.returncode == 0, done.stderr
        assert (NARROW_MOMENTS in done.stderr) is (NARROW_MOMENTS in done.stdout) is (moments == "bf16")
        assert ("the save's moments" in done.stderr) is (told is not None)
        assert told is None or told in done.stderr
        manifest = read_manifest(run_dir / "saves" / f"step_{steps}")
        assert (manifest.precision, manifest.moments) == ("bf16", moments)
        assert manifest.itemsize["m"] == manifest.itemsize["v"] == {"bf16": 2, "fp32": 4}[moments]
        recipe = dataclasses.replace(recipe_of(run_dir, tree), moments=moments, steps=steps)
        first = theirs.step if theirs else 0
        theirs = train_reference(model, batches[first:steps], recipe, theirs)
        their_losses += theirs.losses
    assert losses(run_dir) == their_losses
    assert theirs is not None
    for name, master in exported_masters(run_dir, tmp_path / "fp32").items():
        assert torch.equal(master, theirs.masters[name].flatten()), name


def test_muon_is_refused_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path / "config.yaml", config(tmp_path / "run", build_tiny(tmp_path / "model")))
    assert main(["plan", str(path), "train.optimizer=muon", "train.moments=bf16"]) == 2
    assert "train.moments: bf16 goes with AdamW alone, and train.optimizer is muon; set fp32" in capsys.readouterr().err


def test_the_plan_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path / "config.yaml", config(tmp_path / "run", build_tiny(tmp_path / "model")))
    assert main(["plan", str(path), "train.precision=bf16", "train.moments=bf16"]) == 0
    shown = capsys.readouterr().out
    assert f"moments   {NARROW_MOMENTS}" in shown
    assert "6 bytes × " in shown
    assert main(["plan", str(path), "train.precision=bf16"]) == 0
    assert "moments" not in capsys.readouterr().out
