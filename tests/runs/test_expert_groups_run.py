"""Experts in groups through the command line and real actors: trained, saved, exported, resumed with other groups."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.io.checkpoints.safetensors_folder import WeightFolder
from tests.support.expert_ranges import NORM_ERROR
from tests.support.family_models import build_family
from tests.support.in_process import Train
from tests.support.runs import cli_here, config, exported_masters, plan_of, rows, write_config

STEPS = 4


def numbers(run_dir: Path) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"]) for row in rows(run_dir)]


def norms(run_dir: Path) -> list[float]:
    return [row["grad_norm"] for row in rows(run_dir)]


@pytest.mark.long
def test_saves_and_exports_are_those_of_whole_experts(tmp_path: Path, train: Train) -> None:
    """A run with whole blocks equals one with eight parts, which goes on from its save with two, one and eight.

    Without clipping all numbers have the same bits, except for the norm that is written down.
    """
    model = build_family(
        "Qwen3-MoE", tmp_path / "model", vocab_size=300, num_experts_per_tok=3, tie_word_embeddings=True
    )
    changes = {
        "train__steps": STEPS, "train__precision": "bf16", "train__clip": None, "save_every": 2, "save_keep": 3,
        "hardware__num_shards": 2,
    }  # fmt: skip
    masters, paths = {}, {}
    for name, parts in (("whole", 1), ("apart", 8)):
        tree = config(tmp_path / name, model, hardware__block_parts=parts, **changes)
        paths[name] = write_config(tmp_path / f"{name}.yaml", tree)
        done = train(str(paths[name]))
        assert done.returncode == 0, done.stderr
        masters[name] = exported_masters(tmp_path / name, tmp_path / f"masters-{name}")
    names = [layer.name for layer in plan_of(tmp_path / "apart").layers]
    assert sum(".experts." in name for name in names) > 1
    assert numbers(tmp_path / "apart") == numbers(tmp_path / "whole")
    assert all(
        abs(a - b) <= NORM_ERROR * b for a, b in zip(norms(tmp_path / "apart"), norms(tmp_path / "whole"), strict=True)
    )
    assert masters["apart"].keys() == masters["whole"].keys()
    assert [name for name, m in masters["whole"].items() if not torch.equal(m, masters["apart"][name])] == []
    for run, parts in (("apart", 2), ("apart", 1), ("whole", 8)):
        shutil.rmtree(tmp_path / run / "saves" / f"step_{STEPS}")
        done = train(str(paths[run]), f"hardware.block_parts={parts}")
        assert done.returncode == 0, done.stderr
        assert plan_of(tmp_path / run).compute.expert_groups == parts
        assert numbers(tmp_path / run) == numbers(tmp_path / "whole")
        resumed = exported_masters(tmp_path / run, tmp_path / f"resumed-{run}-{parts}")
        assert [name for name, m in masters["whole"].items() if not torch.equal(m, resumed[name])] == []
    assert cli_here("inspect", str(tmp_path / "apart"), "--verify").returncode == 0


@pytest.mark.long
def test_adapters_beside_frozen_experts(tmp_path: Path, train: Train) -> None:
    """Saves leave the base out; it is compared with that of a save whose layers are other ones."""
    model = build_family("Mixtral", tmp_path / "model", vocab_size=300)
    lora = {"match": [r"\.(q|o)_proj$"], "rank": 4, "alpha": 8}
    tree = config(
        tmp_path / "run", model, train__steps=STEPS, train__clip=None, save_every=2, save_keep=3, lora=lora,
        hardware__block_parts=8,
    )  # fmt: skip
    path = write_config(tmp_path / "config.yaml", tree)
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    apart, merged = numbers(tmp_path / "run"), merged_values(tmp_path / "run", tmp_path / "merged")
    shutil.rmtree(tmp_path / "run" / "saves" / f"step_{STEPS}")
    done = train(str(path), "hardware.block_parts=1")
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "run") == apart
    again = merged_values(tmp_path / "run", tmp_path / "again")
    assert again.keys() == merged.keys()
    assert [name for name, values in merged.items() if not torch.equal(again[name], values)] == []


def merged_values(run_dir: Path, out: Path) -> dict[str, torch.Tensor]:
    done = cli_here("export", str(run_dir), str(out), "--merge")
    assert done.returncode == 0, done.stderr
    folder = WeightFolder.open(out)
    return {name: folder.whole(name) for name in folder.names}
