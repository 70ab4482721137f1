"""Makes run directories for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.errors import ConfigError
from megatrain_ray.run.run_dir import RunDir
from tests.support.settings import config


def in_folder(folder: Path, **changes: Any) -> TrainConfig:
    return config(run_dir=str(folder), **changes)


def begin(folder: Path, step: int = 0, **changes: Any) -> None:
    with RunDir.open(in_folder(folder, **changes)) as run:
        run.begin("{}\n", step)


def train(folder: Path, **changes: Any) -> None:
    """Make the directory of a run that has made a step."""
    begin(folder, **changes)
    (folder / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n")


def row(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2.5, "exposed_s": {"h2d": 0.1}} | changes


def content(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() if p.is_file() else "" for p in sorted(folder.rglob("*"))}


def refusal(wanted: TrainConfig) -> str:
    with pytest.raises(ConfigError) as caught, RunDir.open(wanted):
        pytest.fail("opened")
    return str(caught.value)
