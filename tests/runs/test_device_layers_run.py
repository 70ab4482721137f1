"""Layers that live on the device, through the command line and real actors: trained, saved, resumed, exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from tests.support.in_process import Train
from tests.support.runs import assert_equals_reference, config, exported_masters, plan_of, rows, write_config
from tests.support.tiny import build_tiny

STEPS = 6


def test_saved_and_resumed_wherever_layers_live(tmp_path: Path, train: Train) -> None:
    """A resumed run has the same bits, wherever layers live.

    Six steps are made with three layers on the device and a save after each second. Then the run goes on from the save
    in the middle, with no layers there, and with all.
    """
    model = build_tiny(tmp_path / "model", attention_dropout=0.1)
    tree = config(
        tmp_path / "run", model, train__steps=STEPS, train__precision="bf16", save_every=2, save_keep=3,
        hardware__hbm_layers=3, hardware__num_shards=2,
    )  # fmt: skip
    path = write_config(tmp_path / "config.yaml", tree)
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    assert plan_of(tmp_path / "run").hbm_layers == {0, 1, 2}
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "whole")
    whole, masters = rows(tmp_path / "run"), exported_masters(tmp_path / "run", tmp_path / "masters")
    for number in (0, 5):
        shutil.rmtree(tmp_path / "run" / "saves" / "step_4")
        shutil.rmtree(tmp_path / "run" / "saves" / "step_6")
        done = train(str(path), f"hardware.hbm_layers={number}")
        assert done.returncode == 0, done.stderr
        assert len(plan_of(tmp_path / "run").hbm_layers) == number
        got = [(row["step"], row["loss"], row["grad_norm"]) for row in rows(tmp_path / "run")]
        assert got == [(row["step"], row["loss"], row["grad_norm"]) for row in whole]
        for name, master in exported_masters(tmp_path / "run", tmp_path / f"resumed-{number}").items():
            assert torch.equal(master, masters[name]), name


def test_too_many(tmp_path: Path, train: Train) -> None:
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"), hardware__hbm_layers=6)
    refused = train(str(write_config(tmp_path / "config.yaml", tree)))
    assert refused.returncode == 2
    assert "hardware.hbm_layers: 6 layers cannot live on the device, only 5 of 5" in refused.stderr
