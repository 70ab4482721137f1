"""`megatrain logprobs` through the command line: the plain model's numbers, in the cache beside the tokens."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.config.groups import DataConfig
from megatrain_ray.data.data_worker import DataWorker, HeldOutData
from megatrain_ray.io.tokens.logprob_files import LogprobWriter
from tests.support.held_out_loss import plain_logprobs
from tests.support.in_process import Train
from tests.support.reference import Recipe
from tests.support.runs import cli_here, config, write_config
from tests.support.tiny import TEXT, VOCAB_SIZE, as_tensors, build_tiny


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatrain-ray" / "tokens"


def tree_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a configuration with packed documents, two of them short, and held-out data."""
    for name, part in {
        "a": slice(0, 900),
        "b": slice(900, 950),
        "c": slice(950, 1000),
        "held": slice(2000, 2100),
    }.items():
        (folder / f"{name}.txt").write_text(TEXT.read_text()[part])
    return config(
        folder / "run", build_tiny(folder / "model", attention_dropout=0.2), train__steps=3,
        data__path=[str(folder / f"{name}.txt") for name in "abc"], data__eval_path=str(folder / "held.txt"), **changes,
    )  # fmt: skip


def scored(train: Train, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Return the rows that the command prints, and what it says of the pass that makes them; nothing without one."""
    with train.actors():
        done = cli_here("logprobs", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr.partition("log-probabilities: ")[2]


def assert_plain(data: DataConfig, rows: list[dict[str, Any]], model: Path) -> None:
    """Assert that what batches have of these folders are the plain model's log-probabilities, bit for bit."""
    tokens, logprobs = ([Path(row[key]) for row in rows] for key in ("tokens", "logprobs"))
    worker = DataWorker(data, tokens[:1], VOCAB_SIZE, 4, 0, None, logprobs=[logprobs[0].parent])
    batches = [worker.batch(step) for step in (1, 2, 3)]
    if data.held_out:
        held_out = HeldOutData(data.held_out, (tokens[1],), VOCAB_SIZE, 4, 1, (logprobs[1].parent,)).open()
        batches += [held_out.batch(index) for index in range(held_out.num_batches)]
    batches = list(map(as_tensors, batches))
    ours = torch.cat([batch.reference_logprobs.flatten() for batch in batches])
    assert torch.equal(ours, plain_logprobs(model, batches, Recipe(1, num_threads=1)))
    if data.held_out:
        assert rows[1]["mean_logprob"] == pytest.approx(ours[12 * 32 :].double().sum().item() / 96, rel=1e-12)


def test_they_are_the_plain_models_and_are_computed_once(
    tmp_path: Path, cache: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the pass is interrupted. Then it is made, also by two GPU workers, and for the save of a run."""
    tree = tree_of(tmp_path)
    path, data = write_config(tmp_path / "config.yaml", tree), DataConfig.model_validate(tree["data"])

    def interrupted(self: LogprobWriter, index: int, *arguments: Any) -> None:
        if index == 2:
            os.kill(os.getpid(), signal.SIGINT)
        write(self, index, *arguments)

    write = LogprobWriter.write
    with monkeypatch.context() as patch, train.actors():
        patch.setattr(LogprobWriter, "write", interrupted)
        done = cli_here("logprobs", str(path))
    assert (done.returncode, done.stdout) == (130, "")
    assert "of which nothing is kept; the same command begins it again" in done.stderr
    assert len(list(cache.iterdir())) == 2, "tokens and nothing else"

    rows, said = scored(train, str(path))
    assert said.startswith("1.07k tokens in ")
    assert [row["targets"] for row in rows] == [969, 96]
    assert_plain(data, rows, tmp_path / "model")
    assert not (tmp_path / "run").exists()
    assert scored(train, str(path)) == (rows, "")

    Path(rows[0]["logprobs"]).write_bytes(b"\0" * Path(rows[0]["logprobs"]).stat().st_size)
    again, said = scored(train, str(path), "hardware.num_gpus=2", "train.accumulate=2")
    assert (again, said[:12]) == (rows, "972 tokens i"), "only of the damaged source"
    assert_plain(data, rows, tmp_path / "model")

    assert train(str(path), "train.steps=2").returncode == 0
    arguments = str(path), "--model", str(tmp_path / "run"), "data.eval_path=null"
    of_run, said = scored(train, *arguments, "--step", "2")
    assert said
    assert scored(train, *arguments) == (of_run, "")
    assert cli_here("export", str(tmp_path / "run"), str(tmp_path / "out")).returncode == 0
    assert_plain(data.model_copy(update={"eval_path": None}), of_run, tmp_path / "out")


def test_what_is_no_model_is_refused(tmp_path: Path, cache: Path) -> None:
    path = str(write_config(tmp_path / "config.yaml", tree_of(tmp_path)))
    for arguments, message in (
        (["--step", "3"], "--step and --best name a save of a run, and model.path is no run directory"),
        (["--model", str(tmp_path / "gone")], "gone is no folder, nor can it be a hub id"),
        (["--model", str(tmp_path / "cache")], "config.json"),
    ):
        refused = cli_here("logprobs", path, *arguments)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert message in refused.stderr
