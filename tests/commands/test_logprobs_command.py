"""`megatrain logprobs` through the command line: the plain model's numbers, in the cache beside the tokens."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_worker import DataWorker, HeldOutData
from megatrain_ray.io.tokens import logprob_files
from megatrain_ray.io.tokens.logprob_files import LOGPROBS_NAME, PROGRESS_NAME, LogprobWriter
from tests.support.disk_faults import Moment, Moments, disk_calls
from tests.support.held_out_loss import plain_logprobs
from tests.support.in_process import Train, actors_as_threads
from tests.support.reference import Recipe
from tests.support.runs import cli_here, config, write_config
from tests.support.tiny import TEXT, VOCAB_SIZE, as_tensors, build_tiny

MOST_MOMENTS = 160


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
    """First the pass is interrupted, and goes on. Then it is made by two GPU workers, and for the save of a run."""
    tree = tree_of(tmp_path)
    path, data = write_config(tmp_path / "config.yaml", tree), DataConfig.model_validate(tree["data"])

    def interrupted(self: LogprobWriter, rows: range, *arguments: Any) -> None:
        if rows.start == 8:
            os.kill(os.getpid(), signal.SIGINT)
        write(self, rows, *arguments)

    write = LogprobWriter.write
    with monkeypatch.context() as patch, train.actors():
        patch.setattr(LogprobWriter, "write", interrupted)
        done = cli_here("logprobs", str(path))
    assert (done.returncode, done.stdout) == (130, "")
    assert "those that are computed are kept, and the same command goes on" in done.stderr
    assert len(list(cache.iterdir())) == 4, "tokens of two sources, and what is begun"

    kept = sum(json.loads(file.read_text())["num_rows"] for file in cache.rglob(PROGRESS_NAME))
    assert kept >= 12
    rows, said = scored(train, str(path))
    assert said.startswith(f"{1068 - 32 * kept} tokens in "), said
    assert [row["targets"] for row in rows] == [969, 96]
    assert_plain(data, rows, tmp_path / "model")
    assert not (tmp_path / "run").exists()
    assert scored(train, str(path)) == (rows, "")

    values = Path(rows[0]["logprobs"]).read_bytes()
    Path(rows[0]["logprobs"]).write_bytes(b"\0" * Path(rows[0]["logprobs"]).stat().st_size)
    again, said = scored(train, str(path), "hardware.num_gpus=2", "train.accumulate=2")
    assert (again, said[:12]) == (rows, "972 tokens i"), "only of the damaged source"
    assert Path(rows[0]["logprobs"]).read_bytes() == values, "as without the interruption"

    assert train(str(path), "train.steps=2").returncode == 0
    arguments = str(path), "--model", str(tmp_path / "run"), "data.eval_path=null"
    of_run, said = scored(train, *arguments, "--step", "2")
    assert said
    assert scored(train, *arguments) == (of_run, "")
    assert cli_here("export", str(tmp_path / "run"), str(tmp_path / "out")).returncode == 0
    assert_plain(data.model_copy(update={"eval_path": None}), of_run, tmp_path / "out")


@dataclass(frozen=True)
class Pass:
    """Holds an undisturbed pass whose rows are durable at once, and where it can be killed.

    values: bytes of logprobs.bin by the name of its folder.
    """

    cache: Path
    file: Path
    values: dict[str, bytes]
    moments: Sequence[Moment]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pass]:
    folder = tmp_path_factory.mktemp("killed_pass")
    path, cache = write_config(folder / "config.yaml", tree_of(folder)), folder / "cache"
    cache.mkdir()
    moments = Moments(cache, folder / "moments")
    with pytest.MonkeyPatch.context() as patch, actors_as_threads():
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(logprob_files, "SYNC_S", 0.0)
        with disk_calls(cache, moments):
            done = cli_here("logprobs", str(path))
        assert done.returncode == 0, done.stderr
        assert len(moments.all) <= MOST_MOMENTS
        yield Pass(cache, path, values_of(cache), moments.all)


def values_of(cache: Path) -> dict[str, bytes]:
    return {file.parent.name: file.read_bytes() for file in cache.rglob(LOGPROBS_NAME)}


@pytest.mark.spread(2)
@pytest.mark.parametrize("number", range(MOST_MOMENTS))
def test_a_pass_goes_on_from_any_kill(undisturbed: Pass, number: int) -> None:
    if number >= len(undisturbed.moments):
        return
    shutil.rmtree(undisturbed.cache)
    undisturbed.moments[number].folder.rename(undisturbed.cache)
    tokens = undisturbed.cache / "megatrain-ray" / "tokens"
    folders = [file.parent for file in tokens.glob(f"[!.]*/{PROGRESS_NAME}")]
    begun = [folder for folder in folders if "logprobs" not in json.loads((folder / "meta.json").read_text())]
    num_rows = [json.loads((folder / PROGRESS_NAME).read_text())["num_rows"] for folder in begun]
    done = cli_here("logprobs", str(undisturbed.file))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stderr.count(" rows are there already") == sum(map(bool, num_rows))
    assert values_of(undisturbed.cache) == undisturbed.values
    assert list(undisturbed.cache.rglob(".*")) == []


PROMPTS = [
    "data.kind=prompts", "data.path=prompts.jsonl", "data.eval_path=null", "train.objective=grpo",
    "train.rollouts={rewards: ['FILE.py:reward'], group_size: 2, max_new_tokens: 9}",
]  # fmt: skip


def test_what_is_no_model_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "p"}\n')
    path = str(write_config(tmp_path / "config.yaml", tree_of(tmp_path)))
    for arguments, message in (
        (["--step", "3"], "--step and --best name a save of a run, and model.path is no run directory"),
        (["--model", str(tmp_path / "gone")], "gone is no folder, nor can it be a hub id"),
        (["--model", str(tmp_path / "cache")], "config.json"),
        (PROMPTS, "data.kind: prompts: without answers there is nothing to compute"),
    ):
        refused = cli_here("logprobs", path, *arguments)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert message in refused.stderr
