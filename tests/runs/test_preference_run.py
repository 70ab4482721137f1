"""Runs on preferences through the command line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.console.startup import Startup
from megatrain_ray.data.data_worker import open_stream
from megatrain_ray.io.files.cache_folder import cache_folder
from megatrain_ray.start_of_run import tokenize_all
from megatrain_ray.training_run import compute_logprobs
from tests.support.families import FAMILIES
from tests.support.in_process import Train
from tests.support.runs import assert_equals_reference, cli_here, config, losses, rows, write_config
from tests.support.tiny import as_tensors, build_tiny

STEPS = 4


def data_in(folder: Path, count: int) -> dict[str, Any]:
    """Return data with rows of their own for both answers."""
    records = [{"prompt": "q" * n, "chosen": "a" * (n % 7 + 1), "rejected": "b" * (n % 5 + 1)} for n in range(1, count)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {
        "kind": "pairs", "packing": False, "path": str(folder / "pairs.jsonl"), "eval_fraction": 0.3,
        "tokenizer": "bytes", "seq_len": 201,
    }  # fmt: skip


def test_a_model_that_cannot_pack_and_was_drawn_at_random(tmp_path: Path, train: Train) -> None:
    model = FAMILIES["Bloom"].config | {"vocab_size": 257, "hidden_dropout": 0.0}
    tree = config(tmp_path / "run", model, train__steps=1, train__objective="dpo", eval_every=1)
    tree["data"] = data_in(tmp_path, 12) | {"packing": True}
    path = write_config(tmp_path / "config.yaml", tree)
    refused = train(str(path))
    assert refused.returncode == 2
    assert "data.kind: pairs: both answers of a preference share a row: this model does not keep" in refused.stderr
    assert "; set data.packing: false" in refused.stderr
    done = train(str(path), "data.packing=false")
    assert done.returncode == 0, done.stderr
    clock = [float(seconds) for seconds in re.findall(r"^ *([0-9.]+) s  ", done.stderr, re.MULTILINE)]
    assert clock == sorted(clock), "the phases of the pass are those of the same start"
    planned = next(line for line in cli_here("plan", str(path), "data.packing=false").stdout.splitlines()
                   if line.startswith("reference RAM "))  # fmt: skip
    speed = planned.partition("; predicted ")[2]
    assert " in the cache; predicted " in planned and f"time      predicted {speed}" in done.stderr
    evaluated = json.loads((tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()[-1])
    with train.actors():
        alone = cli_here("eval", str(tmp_path / "run"), "--json")
        assert (alone.returncode, "log-probabilities: " in alone.stderr) == (0, False), alone.stderr
        assert json.loads(alone.stdout)["eval_loss"] == evaluated["eval_loss"]
        arguments = "logprobs", str(path), "data.packing=false"
        first, held = (json.loads(line) for line in cli_here(*arguments, "--json").stdout.splitlines())
        (line, _) = cli_here(*arguments).stdout.splitlines()
    assert first["targets"] == first["chosen"]["targets"] + first["rejected"]["targets"] > held["targets"]
    assert first["mean_logprob"] * first["targets"] == pytest.approx(
        sum(first[answer]["mean_logprob"] * first[answer]["targets"] for answer in ("chosen", "rejected"))
    )
    assert "  chosen: " in line and "  rejected: " in line


def test_a_run_on_preferences_equals_the_reference_and_goes_on_where_it_was_saved(tmp_path: Path, train: Train) -> None:
    numbers = {"beta": 2.0, "label_smoothing": 0.1, "sft_weight": 0.1}
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"), save_every=2, save_keep=9, eval_every=2)
    tree["train"] |= {
        "steps": STEPS,
        "batch_size": 2,
        "micro_batch_size": 1,
        "accumulate": 2,
        "objective": "dpo",
        "preference": numbers,
    }
    tree["data"] = data_in(tmp_path, 25)
    path = write_config(tmp_path / "config.yaml", tree)
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    first, run_dir = rows(tmp_path / "run"), tmp_path / "run"
    assert f"  margin {first[0]['reward_margin']:.3g}  accuracy {first[0]['reward_accuracy']:.3g}  norm" in done.stdout
    evaluations = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    assert "perplexity" not in evaluations[0]
    assert evaluations[0]["eval_reward_chosen"] == 0.0  # the reference is the model before the first update
    assert evaluations[0]["eval_reward_margin"] == pytest.approx(
        evaluations[0]["eval_reward_chosen"] - evaluations[0]["eval_reward_rejected"]
    )
    shown = cli_here("inspect", str(run_dir)).stdout
    assert f"eval_loss {evaluations[-1]['eval_loss']:.4f}  margin " in shown
    assert f"  chosen {rows(run_dir)[-1]['reward_chosen']:.4f}  margin " in shown
    assert cli_here("report", str(run_dir)).returncode == 0
    page = (run_dir / "report.html").read_text()
    assert "Mean reward of the answers" in page and "whose chosen answer has more reward" in page

    shutil.rmtree(run_dir / "saves" / "step_4")
    for logprobs in cache_folder().glob("tokens/*/logprobs.bin"):
        shutil.rmtree(logprobs.parent)
    again = train(str(path))
    assert again.returncode == 0
    assert "log-probabilities of this run are not in the cache any more" in again.stderr
    assert losses(run_dir) == [row["loss"] for row in first]
    with train.actors():  # both find what the run has made
        alone = cli_here("eval", str(run_dir), "--json")
        assert (alone.returncode, "log-probabilities: " in alone.stderr) == (0, False), alone.stderr
        for key in ("eval_loss", "eval_reward_margin"):
            assert json.loads(alone.stdout)[key] == evaluations[-1][key]
        settings, data = tokenize_all(load_config(path), 257, run_dir, Startup())
        found = compute_logprobs(None, settings, data, run_dir)
    stream = open_stream(settings.data, data.training, 257, 2, found.training)
    batches = [as_tensors(stream.next_batch()) for _ in range(STEPS)]
    assert_equals_reference(run_dir, tree, tmp_path / "export", batches)
    shown = cli_here("data", str(path)).stdout
    assert "── pair 1 of " in shown and ", rejected: " in shown
