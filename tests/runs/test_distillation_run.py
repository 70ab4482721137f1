"""A run that learns from a teacher, through the command line."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.console.startup import Startup
from megatrain_ray.data.data_worker import open_stream
from megatrain_ray.engine.objectives.distillation import Softmax, TopTokens
from megatrain_ray.io.files.cache_folder import cache_folder
from megatrain_ray.start_of_run import tokenize_all
from megatrain_ray.training_run import compute_logprobs
from tests.support.in_process import Train
from tests.support.runs import assert_equals_reference, cli_here, config, losses, rows, write_config
from tests.support.teacher import predicted_by
from tests.support.tiny import as_tensors, build_tiny

STEPS = 4


def prepare(tmp_path: Path, teacher: str) -> tuple[dict[str, Any], Path]:
    """Return the settings of a run that learns from `teacher`, and their file."""
    chats = [
        [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "ab" * (n % 7 + 1)}]
        for n in range(1, 40)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"), save_every=2, save_keep=9, eval_every=2)
    numbers = {"temperature": 2.0, "beta": 0.5, "sft_weight": 0.1}
    tree["train"] |= {
        "steps": STEPS, "batch_size": 2, "micro_batch_size": 1, "accumulate": 2, "objective": "distill",
        "distillation": {"teacher": teacher, "top_k": 8, **numbers},
    }  # fmt: skip
    tree["data"] = {
        "kind": "sft", "path": str(tmp_path / "chats.jsonl"), "eval_fraction": 0.3, "tokenizer": "bytes",
        "seq_len": 200,
    }  # fmt: skip
    return tree, write_config(tmp_path / "config.yaml", tree)


def test_a_teacher_whose_ids_may_be_others_is_refused(tmp_path: Path) -> None:
    _, path = prepare(tmp_path, str(build_tiny(tmp_path / "teacher", num_layers=2, vocab_size=260)))
    for command in ("train", "plan"):
        refused = cli_here(command, str(path))
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "must have the same ids: it has no tokenizer, and its vocab_size is 260 instead of 257" in refused.stderr
        gone = cli_here(command, str(path), "train.distillation.teacher=/gone")
        assert "error: train.distillation.teacher: /gone is no folder" in gone.stderr


def test_a_run_learns_from_a_teacher_and_goes_on_where_it_was_saved(tmp_path: Path, train: Train) -> None:
    """The teacher has another number of layers."""
    teacher = build_tiny(tmp_path / "teacher", num_layers=2, seed=1)
    tree, path = prepare(tmp_path, str(teacher))
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    assert "the 8 likeliest tokens have " in done.stderr
    run_dir = tmp_path / "run"
    first = rows(run_dir)
    evaluations = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert first[0]["loss"] != first[0]["cross_entropy"]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    for row in evaluations:
        assert row["perplexity"] == pytest.approx(math.exp(row["eval_cross_entropy"]))
    shown = f"eval_loss {evaluations[-1]['eval_loss']:.4f}  perplexity {evaluations[-1]['perplexity']:.5g}"
    assert shown in cli_here("inspect", str(run_dir)).stdout
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    planned = (cli_here("plan", str(path), f"train.distillation.top_k={top_k}").stdout for top_k in (257, 5000))
    all_ids, more = ([line for line in text.splitlines() if line.startswith("teacher ")] for text in planned)
    assert all_ids == more and len(more) == 1, "no more ids than there are"

    shutil.rmtree(run_dir / "saves" / "step_4")
    for records in cache_folder().glob("tokens/*/teacher.bin"):
        shutil.rmtree(records.parent)
    again = train(str(path))
    assert again.returncode == 0
    assert "the teacher's log-probabilities of this run are not in the cache any more" in again.stderr
    assert losses(run_dir) == [row["loss"] for row in first]
    top = TopTokens(8, Softmax(2.0, 257))
    with train.actors():
        alone = cli_here("eval", str(run_dir), "--json")
        assert (alone.returncode, "log-probabilities: " in alone.stderr) == (0, False), alone.stderr
        for key in ("eval_loss", "eval_cross_entropy"):
            assert json.loads(alone.stdout)[key] == evaluations[-1][key]
        settings, data = tokenize_all(load_config(path), 257, run_dir, Startup())
        found = compute_logprobs(str(teacher), settings, data, run_dir, teacher=top)
    stream = open_stream(settings.data, data.training, 257, 2, found.training)
    batches = [as_tensors(stream.next_batch()) for _ in range(STEPS)]
    for batch in batches:
        for ours, plain in zip(batch.teacher, predicted_by(teacher, batch, 8, 2.0), strict=True):
            assert torch.equal(ours, plain) if ours.dtype == torch.int32 else torch.allclose(ours, plain)
    assert_equals_reference(run_dir, tree, tmp_path / "export", batches)
