"""The rows of the tables of speed can be run by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import rows
from megatrain_ray.config.yaml_file import load_config


@pytest.mark.parametrize("row", rows.ROWS)
def test_every_row_is_a_configuration(row: str) -> None:
    name, *settings = (text for text in rows.ROWS[row] if text != rows.ALIASED)
    config = load_config(rows.CONFIGS / name, settings).resolve()
    assert config.hardware.device == "cuda"
    assert config.save_every is None


def test_options_behind_two_dashes_go_to_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[str]] = {}

    def measure(row: str, limit_s: float, out: Path, more: list[str]) -> bool:
        seen[row] = [str(limit_s), *more]
        return row != "14.8b"

    monkeypatch.setattr(rows, "measure", measure)
    ended = rows.main([str(tmp_path), "14.8b:7", "3.1b", "--steps", "5", "--", "--no-ceiling", "train.lr=0"])
    assert ended == 1, "one of them failed"
    assert seen == {
        "14.8b": ["7.0", "--warmup=1", "--steps=5", "--no-ceiling", "train.lr=0"],
        "3.1b": ["300.0", "--warmup=1", "--steps=5", "--no-ceiling", "train.lr=0"],
    }


def test_a_row_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "END_S", 0.5)
    stuck = [sys.executable, "-c", "import signal; print('{}', flush=True); signal.pause()"]
    with (tmp_path / "log").open("w") as log:
        assert json.loads(rows._run(stuck, 0.5, log.fileno())) == {}


def test_an_unknown_row_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.rows", str(tmp_path), "7b"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "7b is none of 14.8b, 7.6b" in ended.stderr
