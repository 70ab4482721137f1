"""Runs on labelled answers through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.console.startup import Startup
from megatrain_ray.data.data_worker import open_stream
from megatrain_ray.driver.logprob_pass import LogprobFolders
from megatrain_ray.driver.run_context import DataTokens
from megatrain_ray.io.batching.corpus import Corpus, open_corpus
from megatrain_ray.io.tokens.logprob_files import LOGPROBS_NAME
from megatrain_ray.start_of_run import tokenize_all
from megatrain_ray.training_run import compute_logprobs
from tests.support.in_process import Train
from tests.support.runs import assert_equals_reference, cli_here, config, losses, rows, write_config
from tests.support.tiny import as_tensors, build_tiny

STEPS = 4


class Run(NamedTuple):
    """Holds a finished run, its configuration, and what its command printed."""

    path: Path
    tree: dict[str, Any]
    done: CompletedProcess[str]

    @property
    def run_dir(self) -> Path:
        return self.path.parent / "run"

    def evaluations(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "evaluations.jsonl").read_text().splitlines()]

    def logprobs(self) -> tuple[TrainConfig, DataTokens, LogprobFolders]:
        """Return the settings with all decided, the tokens, and the log-probabilities that the run computed."""
        settings, data = tokenize_all(load_config(self.path), 257, self.run_dir, Startup())
        return settings, data, compute_logprobs(None, settings, data, self.run_dir)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, train: Train) -> Run:
    tmp_path = tmp_path_factory.mktemp("unpaired")
    records = [{"prompt": "q" * n, "completion": "ab" * (n % 5 + 1), "label": n % 3 > 0} for n in range(1, 31)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"), save_every=2, save_keep=9, eval_every=2)
    tree["train"] |= {
        "steps": STEPS, "batch_size": 4, "micro_batch_size": 1, "accumulate": 4, "objective": "kto",
        "preference": {"beta": 2.0, "desirable_weight": 0.5},
    }  # fmt: skip
    tree["data"] = {
        "kind": "unpaired", "path": str(tmp_path / "answers.jsonl"), "eval_fraction": 0.3, "tokenizer": "bytes",
        "seq_len": 100,
    }  # fmt: skip
    path = write_config(tmp_path / "config.yaml", tree)
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    return Run(path, tree, done)


def test_what_is_told_of_labelled_answers(run: Run) -> None:
    first, evaluations, run_dir = rows(run.run_dir), run.evaluations(), run.run_dir
    assert any(row["kl"] > 0 for row in first)
    assert f"  margin {first[1]['reward_margin']:.3g}  kl {first[1]['kl']:.3g}  norm" in run.done.stdout
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    # The reference is the model before the first update.
    assert evaluations[0]["eval_reward_chosen"] == evaluations[0]["eval_kl"] == 0
    assert evaluations[2]["eval_reward_margin"] == pytest.approx(
        evaluations[2]["eval_reward_chosen"] - evaluations[2]["eval_reward_rejected"]
    )
    shown = cli_here("inspect", str(run_dir)).stdout
    assert "\n  learns  by kto\n" in shown
    assert f"eval_loss {evaluations[-1]['eval_loss']:.4f}  margin " in shown
    assert cli_here("report", str(run_dir)).returncode == 0
    assert "KL divergence from the reference" in (run_dir / "report.html").read_text()
    shown = cli_here("data", str(run.path)).stdout
    assert "── answer 1 of " in shown and ", good: " in shown


def test_a_run_equals_the_reference_and_goes_on_where_it_was_saved(run: Run, train: Train) -> None:
    first, last = rows(run.run_dir), run.evaluations()[-1]
    shutil.rmtree(run.run_dir / "saves" / "step_4")
    assert train(str(run.path)).returncode == 0
    assert losses(run.run_dir) == [row["loss"] for row in first]
    with train.actors():
        alone = cli_here("eval", str(run.run_dir), "--json")
        assert (alone.returncode, "log-probabilities: " in alone.stderr) == (0, False), alone.stderr
        for key in ("eval_loss", "eval_reward_margin", "eval_kl"):
            assert json.loads(alone.stdout)[key] == last[key]
        settings, data, found = run.logprobs()
    stream = open_stream(settings.data, data.training, 257, 4, found.training)
    batches = [as_tensors(stream.next_batch()) for _ in range(STEPS)]
    assert_equals_reference(run.run_dir, run.tree, run.path.parent / "export", batches)


def test_log_probabilities_of_labelled_answers(run: Run, train: Train) -> None:
    with train.actors():
        lines = cli_here("logprobs", str(run.path), "--json").stdout.splitlines()
        fewer = cli_here("logprobs", str(run.path), "--json", "train.objective=apo_zero_unpaired")
        assert fewer.returncode == 0, fewer.stderr
        _, data, found = run.logprobs()
    for line, tokens, folder in zip(
        lines, (*data.training, *data.held_out), (*found.training, *found.held_out), strict=True
    ):
        assert_means(json.loads(line), open_corpus("", tokens, 257), np.fromfile(folder / LOGPROBS_NAME, "<f4"))
    for row, whole in zip(map(json.loads, fewer.stdout.splitlines()), map(json.loads, lines), strict=True):
        del whole["mismatched"]  # which this objective has no use for, so they are not computed
        assert row.pop("logprobs") != whole.pop("logprobs")
        assert row == whole


def test_two_gpus_make_the_same_run(run: Run, train: Train, tmp_path: Path) -> None:
    changes = (f"run_dir={tmp_path / 'two'}", "hardware.num_gpus=2", "train.accumulate=2")
    assert train(str(run.path), *changes).returncode == 0
    for row, same in zip(rows(tmp_path / "two"), rows(run.run_dir), strict=True):
        for key in ("loss", "kl", "grad_norm"):
            assert row[key] == pytest.approx(same[key], rel=1e-5, abs=1e-6)


def assert_means(row: dict[str, Any], corpus: Corpus, logprobs: NDArray[np.float32]) -> None:
    """Assert that a row of `megatrain logprobs` has means of good and bad answers, and of mismatched ones apart."""
    assert corpus.loss_weights is not None
    ends = np.cumsum(corpus.document_lengths)[:-1]
    kinds: dict[str, list[float]] = {"good": [], "bad": [], "mismatched": []}
    documents = zip(np.split(corpus.loss_weights, ends), np.split(logprobs, ends), strict=True)
    for number, (weights, values) in enumerate(documents):
        kind = "mismatched" if number % 2 else "good" if weights.sum() > 0 else "bad"
        kinds[kind] += values[weights != 0].tolist()
    for kind, found in kinds.items():
        assert row[kind] == {"targets": len(found), "mean_logprob": pytest.approx(sum(found) / len(found))}
    whole = kinds["good"] + kinds["bad"]
    assert (row["targets"], row["mean_logprob"]) == (len(whole), pytest.approx(sum(whole) / len(whole)))
