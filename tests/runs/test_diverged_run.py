"""Runs whose steps are skipped, or whose weights are no numbers any more: the good saves before them stay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from megatrain_ray.io.saves.save_folder import list_saves, load_manifest, save_folder, verify
from tests.support.in_process import Train
from tests.support.runs import config, rows, write_config
from tests.support.tiny import TEXT, build_tiny

GOOD_STEPS, STEPS = 5, 30
STEP_BYTES = 4 * 33  # of a batch of 4 windows of 32 inputs and targets


def build_model(folder: Path) -> Path:
    """Write a tiny model that computes NaN for the byte "~" only, because only its embedding reaches a huge weight."""
    model = LlamaForCausalLM.from_pretrained(build_tiny(folder))
    block = model.model.layers[0]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, -1] = 0.0
        model.model.embed_tokens.weight[ord("~"), -1] = 1.0
        block.self_attn.o_proj.weight[-1] = 0.0
        for projection in (block.mlp.gate_proj, block.mlp.up_proj):
            projection.weight[0, -1] = 1e30  # their product is infinite
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def diverging(tmp_path: Path) -> dict[str, Any]:
    """Return settings of a run that trains the head, whose batches hold a "~" from step GOOD_STEPS + 1 on."""
    good, bad = TEXT.read_bytes()[: GOOD_STEPS * STEP_BYTES], b"~" * (STEPS - GOOD_STEPS) * STEP_BYTES
    (tmp_path / "text.txt").write_bytes(good + bad)
    changes = {"data__path": str(tmp_path / "text.txt"), "data__shuffle": False, "train__freeze": ["^model"]}
    return config(tmp_path / "run", build_model(tmp_path / "model"), train__steps=STEPS, save_every=2, **changes)


def saved(run: Path) -> list[int]:
    """Return the steps of the saves, after checking that each is whole."""
    steps = list_saves(run / "saves")
    assert [problem for step in steps for problem in verify(save_folder(run / "saves", step))] == []
    assert {path.name for path in (run / "saves").iterdir()} == {f"step_{step}" for step in steps}
    return steps


def test_skipped_steps_end_the_run_and_push_no_good_save_out(
    tmp_path: Path, diverging: dict[str, Any], train: Train
) -> None:
    path, run = str(write_config(tmp_path / "c.yaml", diverging)), tmp_path / "run"
    done = train(path)
    assert done.returncode == 1, done.stderr
    [message] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert re.search(r"the last 1[012] steps were skipped", message), "two more may have been under way"
    assert "the save of step 6 is intact" in message
    skipped = [row["skipped"] for row in rows(run)]
    assert skipped == [False] * GOOD_STEPS + [True] * (len(skipped) - GOOD_STEPS)
    assert saved(run) == [4, 6], "step 6 was the first skipped one, and step 5 was not"

    again = train(path)
    assert again.returncode == 1, "the same steps are skipped again"
    assert saved(run) == [4, 6]

    patient = train(path, "max_skipped=100")
    assert patient.returncode == 0, patient.stderr
    assert len(rows(run)) == STEPS
    assert saved(run) == [4, 6], "no step after that changed a weight"


def test_updates_before_the_run_diverged_are_saved(tmp_path: Path, diverging: dict[str, Any], train: Train) -> None:
    """With save_every: 0 no save came before, and the run saves the weights of its last good step."""
    path = str(write_config(tmp_path / "c.yaml", diverging))
    done = train(path, "save_every=0", "max_skipped=1")
    assert done.returncode == 1, done.stderr
    [step] = saved(tmp_path / "run")
    assert step > GOOD_STEPS
    assert f"the save of step {step} is intact" in done.stderr
    assert load_manifest(tmp_path / "run" / "saves", step).optimizer_step == GOOD_STEPS


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path, train: Train) -> None:
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"), save_every=1, train__lr=1e39)
    done = train(str(write_config(tmp_path / "c.yaml", tree)))
    assert done.returncode == 1, done.stderr
    assert "step 1 cannot be saved: " in done.stderr
    assert "holds a value that is not finite, so training has diverged; there is no save yet" in done.stderr
    assert saved(tmp_path / "run") == []
