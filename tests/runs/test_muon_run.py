"""Muon as a user meets it: through the command line, real actors, saves, a resume and exports."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain_ray.cli import main
from megatrain_ray.io.saves.manifest import read_manifest
from tests.support.in_process import Train
from tests.support.runs import assert_equals_reference, config, plan_of, write_config
from tests.support.tiny import build_tiny

OTHERS = [
    (("train.optimizer=adamw", "train.muon.ns_steps=5"), "train.optimizer: muon -> adamw"),
    (("train.muon.momentum=0.9",), "train.muon.momentum: 0.95 -> 0.9"),
]


def test_train_save_resume_and_export(tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Saves while training goes on; resumed by another number of shards; another optimizer is refused."""
    run_dir = tmp_path / "run"
    tree = config(
        run_dir,
        build_tiny(tmp_path / "model", num_layers=2),
        train__steps=2,
        train__precision="bf16",
        train__schedule="constant",
        train__optimizer="muon",
        train__muon={"ns_steps": 2},
        train__groups=[{"match": "k_proj", "optimizer": "adamw"}, {"match": r"layers\.1\.mlp", "lr": 1e-4}],
        save_every=1,
        hardware__num_shards=2,
    )
    first = train(str(write_config(tmp_path / "first.yaml", tree)))
    assert first.returncode == 0, first.stderr
    manifest = read_manifest(run_dir / "saves" / "step_2")
    embedding, block = manifest.layers[:2]
    assert (embedding.num_muon, block.num_muon) == (0, 2 * 64 * 64 + 32 * 64 + 3 * 64 * 176)
    assert block.size_of("v") == block.size_of("m") - block.num_muon == 32 * 64 + 2 * 64
    assert sum(blob.nbytes for blob in manifest.blobs() if blob.kind == "v") < 0.6 * sum(
        blob.nbytes for blob in manifest.blobs() if blob.kind == "m"
    )
    for overrides, says in OTHERS:
        assert main(["train", str(tmp_path / "first.yaml"), *overrides, "train.steps=4", "train.groups=[]"]) == 2
        assert says in capsys.readouterr().err
    tree["train"]["steps"], tree["hardware"]["num_shards"] = 4, 3
    second = train(str(write_config(tmp_path / "second.yaml", tree)))
    assert second.returncode == 0, second.stderr
    assert_equals_reference(run_dir, tree, tmp_path / "fp32")
    assert main(["inspect", str(run_dir), "--verify"]) == 0
    assert "step 4: good" in capsys.readouterr().out
    assert plan_of(run_dir).num_muon == 2 * block.num_muon


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.optimizer=moun", "train.optimizer: expected 'adamw' or 'muon', got 'moun'"),
        ("train.muon.momentum=1.0", "train.muon.momentum: expected less than 1"),
        ("train.muon.ns_steps=3", "train.muon.ns_steps: goes with train.optimizer: muon; set that, or leave the key"),
        (
            "train.groups=[{match: proj, optimizer: muon}]",
            "train.groups.0.optimizer: muon goes with train.optim",
        ),
        ("train.freeze=[proj] train.optimizer=muon", "train.optimizer: muon has no matrix of the model's layers to"),
        (
            "train.optimizer=muon train.groups=[{match: norm, optimizer: muon}]",
            "optimizer: muon is for matrices and stacks of them, and model.layers.0.input_layernorm.weight has 1",
        ),
    ],
)
def test_what_cannot_be_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, says: str) -> None:
    path = write_config(tmp_path / "config.yaml", config(tmp_path / "run", build_tiny(tmp_path / "model")))
    overrides = override.replace(" train.", "\ntrain.").split("\n")
    assert main(["plan", str(path), *overrides]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "when", "up"),
    [
        (("train.clip=1.0",), "after the backward", "1.05 MiB"),
        (("train.clip=null",), "in the backward", "540.00 KiB"),
        (
            ("train.clip=null", "hardware.num_gpus=2", "train.accumulate=2"),
            "in the backward, divided among 2 GPUs",
            "540.00 KiB",
        ),
    ],
)
def test_the_plan_shows_what_it_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], when: str, up: str
) -> None:
    path = write_config(
        tmp_path / "config.yaml",
        config(tmp_path / "run", build_tiny(tmp_path / "model"), train__precision="bf16", train__optimizer="muon"),
    )
    assert main(["plan", str(path), *overrides]) == 0
    shown = capsys.readouterr().out
    assert "update    Muon of 138k and AdamW of 33.3k parameters in" in shown
    assert "directions in waiting" in shown
    assert f"directions made {when}: " in shown
    assert f"back to the device, {up} a step; directions to the host, 270.00 KiB" in shown
