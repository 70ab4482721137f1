"""A run whose length is given in epochs, and its resume with more of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain_ray.config.yaml_file import load_config
from tests.support.in_process import Train
from tests.support.runs import cli_here, config, rows, write_config
from tests.support.tiny import TEXT, build_tiny

NUM_ROWS, ROW_BYTES = 30, 33


def test_a_run_is_as_long_as_its_epochs_and_goes_on_when_they_are_more(tmp_path: Path, train: Train) -> None:
    data = tmp_path / "data.txt"
    data.write_bytes(TEXT.read_bytes()[: NUM_ROWS * ROW_BYTES])
    tree = config(
        tmp_path / "run", build_tiny(tmp_path / "model"), data__path=str(data), train__schedule="constant",
        train__steps=None, train__epochs=0.5, train__warmup_steps=0.5,
    )  # fmt: skip
    path = write_config(tmp_path / "config.yaml", tree)
    planned = cli_here("plan", str(path))
    assert "run       train.epochs: 0.5; their steps are known once a run has read the data" in planned.stdout

    first = train(str(path))
    assert first.returncode == 0, first.stderr
    assert "30 rows of 32 tokens; 4 steps of 4 rows are 0.533 epochs" in first.stderr
    assert "after 2 steps of warm-up" in first.stderr
    assert "step 4/4  epoch 0.533  loss " in first.stdout
    assert (load_config(tmp_path / "run" / "config.yaml").train.steps, rows(tmp_path / "run")[-1]["lr"]) == (4, 1e-3)
    again = train(str(path))
    assert "already at step 4, the end of train.epochs: 0.5: nothing to do" in again.stdout

    more = train(str(path), "train.epochs=1.1")
    assert more.returncode == 0, more.stderr
    assert "train.steps 4 -> 9" in more.stderr
    assert [(row["step"], row["epoch"]) for row in rows(tmp_path / "run")] == [
        (step, pytest.approx(4 * step / NUM_ROWS)) for step in range(1, 10)
    ]
    starts = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [row["steps"] for row in starts if row["what"] == "start"] == [4, 9]
