"""Rows of metrics as TensorBoard reads them; trackers that are missing, fail, or go on where a run went back.

Of a whole run and its resume: test_run.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.errors import ConfigError, InterruptedRunError, MegatrainError
from megatrain_ray.metrics.sink import End, MetricSink, MetricSinks
from megatrain_ray.metrics.sinks import check_packages, open_sinks
from tests.support.runs import config


def settings(folder: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(config(folder, {"model_type": "llama"}, **changes))


def row(step: int, loss: float) -> dict[str, Any]:
    return {
        "step": step,
        "loss": loss,
        "skipped": False,
        "exposed_s": {"h2d": 0.5},
        "host_bytes": 7,
        "bad_parameter": "a",
    }


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard would draw: steps and values by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_what_the_rows_say(tmp_path: Path) -> None:
    with open_sinks(settings(tmp_path), tmp_path, 1) as sinks:
        sinks.write(row(1, 2.5))
        sinks.write(row(2, float("nan")))
        sinks.write(row(3, 1.5))
    assert scalars(tmp_path / "tensorboard") == {
        "train/loss": [(1, 2.5), (3, 1.5)],
        "train/skipped": [(1, 0.0), (2, 0.0), (3, 0.0)],
        "speed/exposed_s/h2d": [(1, 0.5), (2, 0.5), (3, 0.5)],
        "memory/host_bytes": [(1, 7.0), (2, 7.0), (3, 7.0)],
    }


def test_tensorboard_has_the_configuration_as_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_sinks(settings(tmp_path), tmp_path, 1):
        pass
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    [text] = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("configuration/text_summary")]
    lines = text.splitlines()
    assert all(line.startswith("    ") for line in lines), "Markdown shows it as it is"
    assert load_config(write(tmp_path / "shown.yaml", "\n".join(line[4:] for line in lines))) == settings(tmp_path)


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_evaluations_stand_beside_the_rows_of_steps(tmp_path: Path) -> None:
    evaluation = {"eval_loss": 2.5, "perplexity": float("inf"), "eval_tokens": 7, "eval_losses": {"0": 2.0, "1": 3.0}}
    with open_sinks(settings(tmp_path), tmp_path, 1) as sinks:
        sinks.write({"step": 0, **evaluation})
        sinks.write(row(1, 2.25))
    drawn = scalars(tmp_path / "tensorboard")
    assert drawn["eval/loss"] == [(0, 2.5)]
    assert drawn["eval/losses/1"] == [(0, 3.0)]
    assert drawn["train/loss"] == [(1, 2.25)]
    assert "eval/perplexity" not in drawn


def test_steps_that_a_run_went_back_over_are_shown_once(tmp_path: Path) -> None:
    with open_sinks(settings(tmp_path), tmp_path, 1) as sinks:
        for step in (1, 2, 3, 4):
            sinks.write(row(step, float(step)))
    with open_sinks(settings(tmp_path), tmp_path, 3) as sinks:
        sinks.write(row(3, 30.0))
    assert scalars(tmp_path / "tensorboard")["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_without_tensorboard_nothing_is_written(tmp_path: Path) -> None:
    with open_sinks(settings(tmp_path, log__tensorboard=False), tmp_path, 1) as sinks:
        sinks.write(row(1, 1.0))
    assert list(tmp_path.iterdir()) == []


class Broken(MetricSink):
    """A tracker whose server goes away at step 2."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.seen.append(step)
        if step == 2:
            raise ConnectionError("no route to host")

    def close(self, end: End) -> None: ...


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
    monkeypatch.setattr("megatrain_ray.metrics.sinks.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"log.{name}: the package {name} is not installed: pip install {name}"):
        check_packages(settings(tmp_path, **{f"log__{name}": "mine"}))


# --- trackers: packages of the same signatures, which remember what they are told ---


class WandbRun:
    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self._told.append(("define_metric", name, step_metric))

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self._told.append(data)

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        self._told.append(("finish", exit_code))


@pytest.fixture
def wandb_told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    told: list[Any] = []

    def init(**arguments: Any) -> WandbRun:
        told.append(arguments)
        return WandbRun(told)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return told


class Mlflow:
    """Stands in for an MLflow client and its server.

    Params cannot be written twice. What is sent without waiting counts once somebody has waited for it.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.experiments: list[str] = []

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments.append(name)
        return "7"

    def search_runs(self, experiment_ids: list[str], filter_string: str = "") -> list[Any]:
        tag = filter_string.split("'")[1]
        return [SimpleNamespace(info=SimpleNamespace(run_id=i)) for i, r in self.runs.items() if r["tag"] == tag]

    def create_run(self, experiment_id: str, tags: dict[str, str] | None = None, run_name: str | None = None) -> Any:
        run = {"tag": (tags or {})["megatrain_run"], "status": "RUNNING", "params": {}, "metrics": []}
        self.runs[f"run {len(self.runs)}"] = run
        return SimpleNamespace(info=SimpleNamespace(run_id=f"run {len(self.runs) - 1}"))

    def update_run(self, run_id: str, status: str | None = None) -> None:
        self.runs[run_id]["status"] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), synchronous: bool | None = None) -> Any:
        assert len(params) <= 100
        for key, value in params:
            assert key not in self.runs[run_id]["params"]
            self.runs[run_id]["params"][key] = value
        return SimpleNamespace(wait=lambda: self.runs[run_id]["metrics"].extend(metrics))

    def set_terminated(self, run_id: str, status: str | None = None) -> None:
        self.runs[run_id]["status"] = status


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Mlflow:
    client = Mlflow()
    entities = SimpleNamespace(
        Metric=lambda key, value, timestamp, step: (step, key, value), Param=lambda key, value: (key, value)
    )
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: client, entities=entities))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return client


ENDS: dict[type[BaseException] | None, End] = {
    None: End.FINISHED,
    MegatrainError: End.FAILED,
    InterruptedRunError: End.KILLED,
    KeyboardInterrupt: End.KILLED,
}


def trained(wanted: TrainConfig, folder: Path, step: int, error: type[BaseException] | None) -> None:
    with suppress(*filter(None, [error])), open_sinks(wanted, folder, step) as sinks:
        sinks.write(row(step, 2.5))
        if error:
            raise error("it ended")


@pytest.mark.parametrize("error", ENDS)
def test_wandb_goes_on_in_the_same_run_and_knows_its_end(
    tmp_path: Path, wandb_told: list[Any], error: type[BaseException] | None
) -> None:
    named = {"project": "mine", "entity": "us", "tags": ["a", "b"]}
    wanted = settings(tmp_path, log__tensorboard=False, log__wandb=named)
    for step in (1, 2):
        trained(wanted, tmp_path, step, error)
    first, second = (told for told in wandb_told if isinstance(told, dict) and "id" in told)
    assert first == second
    assert (first["project"], first["resume"], first["config"]["train"]["steps"]) == ("mine", "allow", 10)
    assert (first["entity"], first["name"], first["tags"]) == ("us", tmp_path.name, ("a", "b"))
    numbers = {"train/loss": 2.5, "train/skipped": 0.0, "speed/exposed_s/h2d": 0.5, "memory/host_bytes": 7.0}
    assert [told for told in wandb_told if isinstance(told, dict) and "id" not in told] == [
        {"step": 1, **numbers},
        {"step": 2, **numbers},
    ]
    assert wandb_told.count(("define_metric", "*", "step")) == 2
    assert wandb_told[-1] == ("finish", ENDS[error].value)


@pytest.mark.parametrize("error", ENDS)
def test_mlflow_goes_on_in_the_same_run_and_knows_its_end(
    tmp_path: Path, mlflow: Mlflow, error: type[BaseException] | None
) -> None:
    wanted = settings(tmp_path, log__tensorboard=False, log__mlflow="mine")
    for step in (1, 2):
        trained(wanted, tmp_path, step, error)
    (run,) = mlflow.runs.values()
    assert mlflow.experiments == ["mine"]
    assert run["status"] == ENDS[error].name
    assert {key: run["params"][key] for key in ("train.steps", "train.betas", "model.config.model_type")} == {
        "train.steps": "10", "train.betas": "[0.9, 0.95]", "model.config.model_type": "llama",
    }  # fmt: skip
    assert [(step, value) for step, name, value in run["metrics"] if name == "train/loss"] == [(1, 2.5), (2, 2.5)]


def test_a_tracker_that_cannot_be_opened_ends_the_others(
    tmp_path: Path, wandb_told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ConnectionError("no database")

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=refuse))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Param=None))
    wanted = settings(tmp_path, log__tensorboard=False, log__wandb="mine", log__mlflow="mine")
    with pytest.raises(ConfigError, match=r"log.mlflow: .*no database\); name a server in MLFLOW_TRACKING_URI, or pip"):
        trained(wanted, tmp_path, 1, None)
    assert wandb_told[-1] == ("finish", 1)
