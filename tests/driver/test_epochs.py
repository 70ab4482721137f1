"""A run whose length is given in epochs, with a share of its records held out, and its resume with more epochs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.report.inspect_run import state_of_run
from tests.support.in_process import Train
from tests.support.runs import cli_here, config, rows, write_config
from tests.support.tiny import TEXT, build_tiny

NUM_RECORDS, RECORD_CHARS, BATCH_SIZE = 40, 32, 4  # a record and its end fill a row


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_is_as_long_as_its_epochs_and_goes_on_when_they_are_more(tmp_path: Path, train: Train) -> None:
    text, data = TEXT.read_text(), tmp_path / "data.jsonl"
    starts = range(0, 60 * RECORD_CHARS, RECORD_CHARS)
    data.write_text("".join(json.dumps({"text": text[start : start + RECORD_CHARS]}) + "\n" for start in starts))
    tree = config(
        tmp_path / "run", build_tiny(tmp_path / "model"), data__path=str(data), data__packing=False,
        data__eval_fraction=0.25, data__max_records=NUM_RECORDS, train__schedule="constant", train__steps=None,
        train__epochs=0.5, train__warmup_steps=0.5,
    )  # fmt: skip
    path, run_dir = write_config(tmp_path / "config.yaml", tree), tmp_path / "run"
    planned = cli_here("plan", str(path))
    assert (
        "run       train.epochs: 0.5; their steps are known once `megatrain data` or a run has read the data"
        in planned.stdout
    )

    first = train(str(path))
    assert first.returncode == 0, first.stderr
    found = re.search(r"(\d+) rows of 32 tokens; (\d+) steps of 4 rows are", first.stderr)
    assert found is not None
    num_rows, steps = int(found[1]), int(found[2])
    assert f"data      {num_rows} records, {num_rows * (RECORD_CHARS + 1)} tokens, {num_rows} rows of " in first.stderr
    held_out = f"{NUM_RECORDS - num_rows} records held out"
    assert f"epochs (train.epochs: 0.5, up to a whole step); {held_out}" in first.stderr
    assert steps == math.ceil(num_rows / 2 / BATCH_SIZE) >= 3
    assert f"after {math.ceil(steps / 2)} steps of warm-up" in first.stderr
    assert f"step {steps}/{steps}  epoch {steps * BATCH_SIZE / num_rows:.3g}  loss " in first.stdout
    assert (load_config(run_dir / "config.yaml").train.steps, rows(run_dir)[-1]["lr"]) == (steps, 1e-3)
    assert f"step {steps} of {steps}, epoch {steps * BATCH_SIZE / num_rows:.3g}, " in state_of_run(run_dir)
    assert f"run       {steps} steps, " in cli_here("plan", str(path)).stdout  # tokens are cached
    again = train(str(path))
    assert f"already at step {steps}, at or past the end of train.epochs: 0.5: nothing to do" in again.stdout

    more = train(str(path), "train.epochs=1.1")
    assert more.returncode == 0, more.stderr
    last = math.ceil(1.1 * num_rows / BATCH_SIZE)
    assert f"train.steps {steps} -> {last}" in more.stderr
    assert [(row["step"], row["epoch"]) for row in rows(run_dir)] == [
        (step, pytest.approx(BATCH_SIZE * step / num_rows)) for step in range(1, last + 1)
    ]
    evaluations = read(run_dir / "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [0, steps, last]
    assert {row["eval_tokens"] for row in evaluations} == {32 * (NUM_RECORDS - num_rows)}
    assert [row["steps"] for row in read(run_dir / "history.jsonl") if row["what"] == "start"] == [steps, last]

    with train.actors():
        alone = cli_here("eval", str(run_dir), "--json")
    assert json.loads(alone.stdout)["eval_loss"] == evaluations[-1]["eval_loss"]

    refused = train(str(path), "data.eval_fraction=0.5")
    assert refused.returncode == 2
    assert "data.eval_fraction: 0.25 -> 0.5" in refused.stderr
