"""Rows of metrics as TensorBoard reads them; trackers that are missing, fail, or go on where a run went back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config import TrainConfig
from megatrain_ray.errors import ConfigError
from megatrain_ray.metric_sinks import MetricSinks, check_packages, open_sinks
from tests.runs import cli, config, rows, write_config
from tests.tiny import build_tiny


def settings(folder: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(config(folder, {"model_type": "llama"}, **changes))


def row(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "loss": loss, "skipped": False, "exposed_s": {"h2d": 0.5}, "bad_parameter": "a.b"}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would draw."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_what_the_rows_say(tmp_path: Path) -> None:
    with open_sinks(settings(tmp_path), tmp_path, 1) as sinks:
        sinks.write(row(1, 2.5))
        sinks.write(row(2, float("nan")))
        sinks.write(row(3, 1.5))
    assert scalars(tmp_path / "tensorboard") == {
        "loss": [(1, 2.5), (3, 1.5)],
        "skipped": [(1, 0.0), (2, 0.0), (3, 0.0)],
        "exposed_s/h2d": [(1, 0.5), (2, 0.5), (3, 0.5)],
    }


def test_evaluations_stand_beside_the_rows_of_steps(tmp_path: Path) -> None:
    evaluation = {"eval_loss": 2.5, "perplexity": float("inf"), "eval_tokens": 7, "eval_losses": {"0": 2.0, "1": 3.0}}
    with open_sinks(settings(tmp_path), tmp_path, 1) as sinks:
        sinks.write({"step": 0, **evaluation})
        sinks.write(row(1, 2.25))
    drawn = scalars(tmp_path / "tensorboard")
    assert drawn["eval_loss"] == [(0, 2.5)]
    assert drawn["eval_losses/1"] == [(0, 3.0)]
    assert drawn["loss"] == [(1, 2.25)]
    assert "perplexity" not in drawn


def test_steps_that_a_run_went_back_over_are_shown_once(tmp_path: Path) -> None:
    with open_sinks(settings(tmp_path), tmp_path, 1) as sinks:
        for step in (1, 2, 3, 4):
            sinks.write(row(step, float(step)))
    with open_sinks(settings(tmp_path), tmp_path, 3) as sinks:
        sinks.write(row(3, 30.0))
    assert scalars(tmp_path / "tensorboard")["loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_without_tensorboard_nothing_is_written(tmp_path: Path) -> None:
    with open_sinks(settings(tmp_path, log__tensorboard=False), tmp_path, 1) as sinks:
        sinks.write(row(1, 1.0))
    assert list(tmp_path.iterdir()) == []


class Broken:
    """A tracker whose server goes away."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.seen.append(step)
        if step == 2:
            raise ConnectionError("no route to host")

    def close(self) -> None: ...


def test_a_tracker_that_fails_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    broken = Broken()
    sinks = MetricSinks({"Tracker": broken})
    for step in (1, 2, 3):
        sinks.write(row(step, 1.0))
    assert broken.seen == [1, 2]
    message = capsys.readouterr().err
    assert message.startswith("warning: Tracker takes no more metrics (ConnectionError: no route to host)")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_ray.metric_sinks.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"log.{name}: the package {name} is not installed: pip install megatrain-"):
        check_packages(settings(tmp_path, **{f"log__{name}": "mine"}))


def test_a_whole_run_and_its_resume(tmp_path: Path, ray_address: str) -> None:
    path = write_config(tmp_path / "config.yaml", config(tmp_path / "run", build_tiny(tmp_path / "model")))
    for steps in (3, 5):
        done = cli("train", str(path), f"train.steps={steps}", RAY_ADDRESS=ray_address)
        assert done.returncode == 0, done.stderr
    drawn = scalars(tmp_path / "run" / "tensorboard")
    assert [step for step, _ in drawn["loss"]] == [1, 2, 3, 4, 5]
    assert [value for _, value in drawn["loss"]] == pytest.approx([r["loss"] for r in rows(tmp_path / "run")])
    assert {"lr", "grad_norm", "tokens_per_s", "exposed_s/optimizer"} <= drawn.keys()
