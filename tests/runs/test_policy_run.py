"""Runs on recorded rollouts through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.in_process import Train
from tests.support.runs import cli_here, config, losses, rows, write_config
from tests.support.tiny import build_tiny

STEPS = 4


def records() -> list[dict[str, object]]:
    """Return four answers to each of six prompts, all of random ids."""
    generator, found = np.random.default_rng(0), []
    for prompt in range(6):
        ids = generator.integers(0, 256, prompt + 1).tolist()
        for reward in (0, 1, 1, 0.5):
            answer = generator.integers(0, 256, generator.integers(1, 9)).tolist()
            logprobs = (-5.5 - generator.random(len(answer)) / 4).tolist()
            found.append({"prompt_ids": ids, "completion_ids": answer, "logprobs": logprobs, "reward": reward})
    return found


def test_a_run_on_rollouts_goes_on_where_it_was_saved_and_reports(tmp_path: Path, train: Train) -> None:
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records()))
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"), save_every=2, save_keep=9, eval_every=4)
    tree["hardware"]["num_gpus"] = 2
    tree["train"] |= {
        "steps": STEPS, "batch_size": 2, "micro_batch_size": 1, "accumulate": 1, "objective": "grpo",
        "policy": {"beta": 0.1},
    }  # fmt: skip
    tree["data"] = {
        "kind": "rollouts", "path": str(tmp_path / "rollouts.jsonl"), "eval_path": str(tmp_path / "rollouts.jsonl"),
        "tokenizer": "bytes", "seq_len": 40,
    }  # fmt: skip
    path = write_config(tmp_path / "config.yaml", tree)
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    first, run_dir = rows(tmp_path / "run"), tmp_path / "run"
    of_all = [record["reward"] for record in records()]
    assert "24 records: 24 sequences" in done.stderr
    shown = "".join(f"  {name} {first[0][name]:.3g}" for name in ("reward", "kl"))
    assert shown in done.stdout
    assert first[0]["kl"] == 0.0 < first[-1]["kl"]  # the reference is the model before the first update
    assert all(0 <= row["reward"] <= 1 and 0 < row["reward_std"] < 1 <= row["answer_tokens"] for row in first)
    evaluations = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    for row in evaluations:
        assert row["eval_reward"] == pytest.approx(np.mean(of_all))
        assert row["eval_ratio_max"] > 1 and row["perplexity"] == pytest.approx(np.exp(row["eval_cross_entropy"]))
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert f"  reward {first[-1]['reward']:.4f}  kl " in cli_here("inspect", str(run_dir)).stdout
    assert cli_here("report", str(run_dir)).returncode == 0
    page = (run_dir / "report.html").read_text()
    assert "KL divergence from the reference" in page and "Share of tokens whose ratio is clipped" in page

    shutil.rmtree(run_dir / "saves" / "step_4")
    assert train(str(path)).returncode == 0
    assert losses(run_dir) == [row["loss"] for row in first]
    with train.actors():
        alone = cli_here("eval", str(run_dir), "--json")
        assert alone.returncode == 0, alone.stderr
        for key in ("eval_loss", "eval_kl", "eval_clipped_low"):
            assert json.loads(alone.stdout)[key] == evaluations[-1][key]
    shown = cli_here("data", str(path)).stdout
    assert "an epoch is 6 rows" in shown and ", 6 learned, reward 0, advantage -1.31 ──" in shown
