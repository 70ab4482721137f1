"""Divided blocks through the command line and real actors: trained, saved, and resumed with whole ones and back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import build_adapter
from tests.support.in_process import Train
from tests.support.runs import (
    assert_equals_reference,
    cli_here,
    config,
    exported_masters,
    losses,
    plan_of,
    rows,
    write_config,
)
from tests.support.tiny import build_tiny

STEPS = 6


def numbers(run_dir: Path) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(run_dir)]


@pytest.mark.long
def test_saves_are_the_same_however_blocks_are_divided(tmp_path: Path, train: Train) -> None:
    """A resumed run has the same bits, however blocks are divided.

    Six steps are made with four parts a block and a save after each second. Then the run goes on from the save in the
    middle, with whole blocks, and with two parts.
    """
    tree = config(
        tmp_path / "run", build_tiny(tmp_path / "model"), train__steps=STEPS, train__precision="bf16", save_every=2,
        save_keep=3, hardware__num_shards=2, hardware__block_parts=4,
    )  # fmt: skip
    path = write_config(tmp_path / "config.yaml", tree)
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    assert plan_of(tmp_path / "run").compute.block_parts == 4
    assert_equals_reference(tmp_path / "run", tree, tmp_path / "whole")
    whole, masters = numbers(tmp_path / "run"), exported_masters(tmp_path / "run", tmp_path / "masters")
    for parts in (1, 2):
        for step in (4, 6):
            shutil.rmtree(tmp_path / "run" / "saves" / f"step_{step}")
        done = train(str(path), f"hardware.block_parts={parts}")
        assert done.returncode == 0, done.stderr
        assert plan_of(tmp_path / "run").compute.block_parts == parts
        assert numbers(tmp_path / "run") == whole
        for name, master in exported_masters(tmp_path / "run", tmp_path / f"resumed-{parts}").items():
            assert torch.equal(master, masters[name]), name
    assert cli_here("inspect", str(tmp_path / "run"), "--verify").returncode == 0


@pytest.mark.long
def test_adapters_of_a_base_that_saves_leave_out(tmp_path: Path, train: Train) -> None:
    """The base is compared with that of a save of other layers; then it is another one."""
    model = build_tiny(tmp_path / "model")
    adapter = build_adapter(tmp_path / "adapter", model, ["up_proj", "o_proj"])
    lora = {"match": [r"\.(up|o)_proj$"], "rank": 4, "alpha": 8, "path": str(adapter)}
    changes = {"train__steps": 4, "save_every": 2, "lora": lora}
    paths = {}
    for name, parts in (("parts", 3), ("whole", 1)):
        tree = config(tmp_path / name, model, hardware__block_parts=parts, **changes)
        paths[name] = write_config(tmp_path / f"{name}.yaml", tree)
        done = train(str(paths[name]))
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    shutil.rmtree(tmp_path / "parts" / "saves" / "step_4")
    done = train(str(paths["parts"]), "hardware.block_parts=1")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    shutil.rmtree(tmp_path / "parts" / "saves" / "step_4")
    build_tiny(model, seed=1)
    refused = train(str(paths["parts"]), "hardware.block_parts=1")
    assert refused.returncode == 2
    assert "the run's base model has changed: the frozen weights of" in refused.stderr
