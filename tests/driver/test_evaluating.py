"""The driver's side of an evaluation against a fake worker; the row; and runs through the command line."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.data.data_sources import naming_held_out
from megatrain_ray.data.data_worker import HeldOutData
from megatrain_ray.data.tokenize_data import check_there
from megatrain_ray.driver.running_evaluation import RunningEvaluation, evaluation_row, perplexity
from megatrain_ray.errors import ConfigError, NothingToLearnError
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.saves.save_folder import list_saves
from megatrain_ray.run.run_history import read_history
from megatrain_ray.workers.messages import HeldOutLoss
from tests.support.held_out_loss import held_out_loss
from tests.support.in_process import Train
from tests.support.reference import Recipe
from tests.support.runs import assert_equals_reference, cli_here, config, plan_of, write_config
from tests.support.texts import tokens_of, write
from tests.support.tiny import TEXT, VOCAB_SIZE, as_tensors, build_tiny


def test_a_loss_is_the_mean_over_tokens_and_of_weighted_sources_the_mean_of_theirs() -> None:
    one = evaluation_row(4, [[HeldOutLoss(6.0, 3, 2.0), HeldOutLoss(1.0, 4, 5.0)]], (1.0,), 0.5)
    assert one == {"step": 4, "eval_loss": 1.0, "perplexity": math.e, "eval_tokens": 7, "eval_s": 0.5}
    two = evaluation_row(
        4, [[HeldOutLoss(6.0, 2, 2.0)], [HeldOutLoss(1.0, 1, 1.0), HeldOutLoss(1.0, 1, 1.0)]], (3, 1), 0.5
    )
    assert (two["eval_loss"], two["eval_tokens"]) == ((3 * 3.0 + 1.0) / 4, 4)
    assert two["eval_losses"] == {"0": 3.0, "1": 1.0}


class FakeGpu:
    """Stands in for a GPU worker. Its calls are numbers, in the order in which they are made."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []

    def evaluate(self, step: int, index: int) -> int:
        self.made.append((step, index))
        return len(self.made) - 1


@pytest.fixture
def held_out(tmp_path: Path) -> HeldOutData:
    """Five batches, two and three of two sources."""
    write(tmp_path, a="a" * 12, b="b" * 18)
    sources = [{"path": str(tmp_path / f"{name}.txt"), "weight": weight} for name, weight in (("a", 1), ("b", 3))]
    tree = {"path": "x", "eval_path": sources, "seq_len": 2, "tokenizer": "bytes"}
    data = DataConfig.model_validate(tree).held_out
    assert data is not None
    return HeldOutData(data, tokens_of(data, tmp_path), VOCAB_SIZE, 2, 1)


def test_batches_are_asked_for_two_at_a_time_and_may_end_in_any_order(held_out: HeldOutData) -> None:
    gpu = FakeGpu()
    running = RunningEvaluation(gpu.evaluate, held_out.open(), held_out.weights, 4)
    assert (running.calls, gpu.made) == ([0, 1], [(4, 0), (4, 1)])
    for call, under_way in ((1, [0, 2]), (2, [0, 3]), (0, [3, 4]), (4, [3])):
        running.add_result(call, HeldOutLoss(float(call), 1, 1.0))
        assert (running.calls, running.is_over, running.row()) == (under_way, False, None)
    assert running.progress == (4, 5)
    running.add_result(3, HeldOutLoss(3.0, 1, 1.0))
    assert running.is_over
    row = running.row()
    assert row is not None
    assert row["eval_losses"] == {"0": 0.5, "1": 3.0}
    assert (row["step"], row["eval_loss"], row["eval_tokens"]) == (4, (0.5 + 3 * 3.0) / 4, 5)


def test_one_that_is_given_up_begins_nothing_more_and_has_no_row(held_out: HeldOutData) -> None:
    running = RunningEvaluation(FakeGpu().evaluate, held_out.open(), held_out.weights, 4)
    running.add_result(0, HeldOutLoss(1.0, 1, 1.0))
    running.give_up()
    assert running.calls == [1, 2]
    running.add_result(2, HeldOutLoss(1.0, 1, 1.0))
    assert not running.is_over
    running.add_result(1, HeldOutLoss(1.0, 1, 1.0))
    assert running.is_over
    assert running.row() is None


def test_a_perplexity_beyond_all_numbers_is_infinite() -> None:
    assert perplexity(710.0) == math.inf
    assert math.isnan(perplexity(math.nan))


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "eval_s"} for row in rows]


def held_out_batches(tree: dict[str, Any], folder: Path) -> list[Batch]:
    """Return the held-out batches as the run evaluates them."""
    data = DataConfig.model_validate(tree["data"]).held_out
    assert data is not None
    held_out = HeldOutData(data, tokens_of(data, folder), VOCAB_SIZE, 4, 1).open()
    return [as_tensors(held_out.batch(index)) for index in range(held_out.num_batches)]


def keep_rows(run_dir: Path, last_step: int) -> None:
    """Cut the evaluations to what a kill during the next evaluation leaves."""
    rows = [json.dumps(row) + "\n" for row in evaluations(run_dir) if row["step"] <= last_step]
    (run_dir / "evaluations.jsonl").write_text("".join(rows) + '{"step": ')


def test_a_run_evaluates_the_plain_models_loss_and_trains_as_without(tmp_path: Path, train: Train) -> None:
    """Dropout, packed documents, windows that fill no batch; killed in an evaluation in mid-run, and in the last."""
    (tmp_path / "held").mkdir()
    for name, part in {"a": slice(0, 700), "b": slice(700, 1000)}.items():
        (tmp_path / "held" / f"{name}.txt").write_text(TEXT.read_text()[-1000:][part])
    tree = config(
        tmp_path / "run", build_tiny(tmp_path / "model", attention_dropout=0.2),
        train__steps=4, eval_every=3, save_every=3, save_keep=9, data__eval_path=str(tmp_path / "held"),
    )  # fmt: skip
    run_dir, path = tmp_path / "run", write_config(tmp_path / "config.yaml", tree)
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    rows = evaluations(run_dir)
    assert [row["step"] for row in rows] == [0, 3, 4]
    assert_equals_reference(run_dir, tree, tmp_path / "out")  # the reference evaluates nothing

    batches, plan = held_out_batches(tree, run_dir), plan_of(run_dir)
    assert any(batch.positions is not None for batch in batches)
    assert {row["eval_tokens"] for row in rows} == {sum(batch.num_supervised for batch in batches)}
    recipe = Recipe(4, num_threads=plan.compute.num_threads, loss_chunk_tokens=plan.compute.loss_chunk_tokens)
    assert rows[0]["eval_loss"] == held_out_loss(tmp_path / "model", batches, recipe)
    assert rows[-1]["eval_loss"] == held_out_loss(tmp_path / "out", batches, recipe)
    before = sorted(run_dir.rglob("*"))
    alike = [{key: value for key, value in row.items() if key != "epoch"} for row in rows]
    by_folder = {key: value for key, value in alike[2].items() if key != "step"}
    for expected, arguments in (
        (alike[1], [str(run_dir), "--step", "3"]),
        (by_folder, [str(tmp_path / "out"), "--config", str(path), "train.freeze=norm"]),
    ):
        with train.actors():
            alone = cli_here("eval", *arguments, "--json")
        assert alone.returncode == 0, alone.stderr
        assert numbers([json.loads(alone.stdout)]) == numbers([expected]), "bit for bit"
    assert sorted(run_dir.rglob("*")) == before
    assert f"held out  after step 4  eval_loss {rows[-1]['eval_loss']:.4f}" in done.stdout

    shutil.rmtree(run_dir / "saves" / "step_4")
    keep_rows(run_dir, 0)
    again = train(str(path))
    assert again.returncode == 0, again.stderr
    assert numbers(evaluations(run_dir)) == numbers(rows)

    keep_rows(run_dir, 3)
    last = train(str(path))
    assert last.returncode == 0, last.stderr
    assert "done: step 4 (" in last.stdout
    assert numbers(evaluations(run_dir)) == numbers(rows)
    assert "already at step 4 of 4" in train(str(path)).stdout


def test_the_best_save_is_kept_and_a_run_without_a_better_one_ends_early(tmp_path: Path, train: Train) -> None:
    """The learning rate changes no weight. What counts is read from the rows, so that a resume goes on with it."""
    tree = config(
        tmp_path / "run", build_tiny(tmp_path / "model"), train__steps=40, train__lr=1e-30, train__schedule="constant",
        save_keep=1, save_best=True, eval_every=2, eval_patience=3, data__eval_path=str(tmp_path / "held.txt"),
    )  # fmt: skip
    (tmp_path / "held.txt").write_text(TEXT.read_text()[-300:])
    run_dir, path = tmp_path / "run", write_config(tmp_path / "config.yaml", tree)
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    rows = evaluations(run_dir)
    last, best = rows[-1]["step"], min(rows[1:], key=lambda row: row["eval_loss"])["step"]
    assert last == best + 6 < 40
    reason = f"ended early after step {last}: no eval_loss of the last 3 evaluations was better than "
    assert reason in done.stderr
    assert list_saves(run_dir / "saves") == [best, last]
    assert f"with --best: the save of step {best}, the least eval_loss" in done.stdout.splitlines()[-1]
    assert read_history(run_dir)[-1]["how"] == "finished"
    assert read_history(run_dir)[-1]["reason"].startswith(reason)

    for option, step in ((["--best"], best), (["--step", str(last)], last)):
        written = cli_here("export", str(run_dir), str(tmp_path / f"out{len(option)}"), *option)
        assert written.stdout.startswith(f"exported the save of step {step} to ")
    refused = cli_here("export", str(run_dir), str(tmp_path / "none"), "--step", "1")
    remedy = "save_keep keeps more"
    message = f"error: {run_dir} holds no save of step 1; its saves are of steps {best}, {last}; {remedy}\n"
    assert (refused.returncode, refused.stderr.splitlines(keepends=True)[-1]) == (2, message)

    saves = cli_here("inspect", str(run_dir)).stdout.partition("saves\n")[2].splitlines()[:2]
    assert [", best " in line for line in saves] == [True, False]

    shutil.move(run_dir / "saves" / f"step_{best}", tmp_path / "moved")  # as if it had not been kept
    worse = cli_here("export", str(run_dir), str(tmp_path / "worse"), "--best")
    assert worse.stdout.startswith(f"exported the save of step {last} to ")
    assert f"warning: eval_loss was least after step {best}, " in worse.stderr
    shutil.move(tmp_path / "moved", run_dir / "saves" / f"step_{best}")

    again = train(str(path))
    assert (again.returncode, f"already at step {last} of 40" in again.stdout) == (0, True)
    assert f"already at step {last} of 0: nothing to do" in train(str(path), "train.steps=0").stdout
    assert f"the run has {reason}" in again.stderr
    assert "a larger eval_patience, or null, goes on" in again.stderr

    more = train(str(path), "eval_patience=4", f"save_every={last + 2}", f"save_keep_every={last + 2}")
    assert more.returncode == 0, more.stderr
    assert evaluations(run_dir)[: len(rows)] == rows
    assert [row["step"] for row in evaluations(run_dir)[len(rows) :]] == [last + 2]
    assert "of the last 4 evaluations" in more.stderr
    assert list_saves(run_dir / "saves") == [best, last, last + 2]


@pytest.mark.parametrize("value", ["gone.txt", "[{path: gone.txt, weight: 1}]"])
def test_held_out_data_that_are_not_there(tmp_path: Path, value: str) -> None:
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"), eval_every=1)
    refused = cli_here("train", str(write_config(tmp_path / "config.yaml", tree)), f"data.eval_path={value}")
    assert refused.returncode == 2
    assert "data.eval_path: no such file: gone.txt" in refused.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("kept", "key"), [("eval_fraction", "data.eval_fraction"), ("eval_path", "data.eval_path")])
def test_held_out_data_with_nothing_to_learn_are_named_in_lines(kept: str, key: str) -> None:
    value = {"eval_fraction": 0.1, "eval_path": "held"}[kept]
    data = DataConfig.model_validate({"path": "x", "seq_len": 2, "tokenizer": "bytes", kept: value}).held_out
    assert data is not None
    with pytest.raises(ConfigError) as caught, naming_held_out(data):
        raise NothingToLearnError("data.path: nothing to learn", "2 records")
    assert str(caught.value) == f"{key}: nothing to learn\n2 records"


@pytest.mark.parametrize(("length", "warned"), [({"steps": 3}, 1), ({"epochs": 3}, 1), ({"steps": 0}, 0)])
def test_only_a_training_warns_of_held_out_files_that_it_reads(
    length: dict[str, int], warned: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = config(Path("run"), {"model_type": "gpt2"}, data__eval_path=str(TEXT), eval_every=1)
    tree["train"] = {"lr": 1e-3, "batch_size": 1, **length}
    check_there(TrainConfig.model_validate(tree))
    assert capsys.readouterr().err.count("tinyshakespeare.txt is trained on as well") == warned
