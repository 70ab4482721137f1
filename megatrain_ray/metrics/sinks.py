"""Implements the sinks besides metrics.jsonl and opens those of a run: TensorBoard, Weights & Biases, MLflow, Ray."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import Any

from megatrain_ray.config.groups import WandbConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import config_to_dict, dump_config, leaves
from megatrain_ray.console.logs import say
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.errors import ConfigError, InterruptedRunError
from megatrain_ray.io.files.atomic_file import write_atomically
from megatrain_ray.metrics.sink import End, MetricSink, MetricSinks
from megatrain_ray.run.run_files import RunFiles

ID_NAME = "tracker_id"  # file in the run directory
MOST_PARAMS = 100  # parameters that MLflow accepts in one call
MOST_CHARS = 500  # characters that MLflow accepts in one parameter
# Groups of numbers in trackers, by the first part of their name in a row. All others are in the group train.
GROUPS = {
    "eval": (
        "eval_loss", "eval_losses", "perplexity", "eval_tokens", "eval_reward_chosen", "eval_reward_rejected",
        "eval_reward_margin", "eval_reward_accuracy", "eval_reward", "eval_reward_std", "eval_completion_tokens",
        "eval_ended", "eval_answer_tokens", "eval_kl", "eval_clipped_low", "eval_clipped_high", "eval_ratio_max",
        "eval_cross_entropy",
    ),
    "speed": (
        "step_s", "tokens_per_s", "model_tflops", "exposed_s", "update_s", "disk_s", "disk_bytes", "eval_s",
    ),
    "memory": ("hbm_peak_bytes", "host_bytes", "spill_bytes"),
}  # fmt: skip
# mlflow-skinny suffices with a server, but has no database of its own.
ADVICE = {"log.mlflow": "name a server in MLFLOW_TRACKING_URI, or pip install mlflow for a database here, or "}


def grouped(name: str) -> str:
    """Return the name that trackers show a number by: the group that it belongs to, a slash, and its own name."""
    first = name.partition("/")[0]
    group = next((group for group, names in GROUPS.items() if first in names), "train")
    return f"{group}/{name.removeprefix('eval_') if group == 'eval' else name}"


class TensorBoardSink(MetricSink):
    """Writes event files to a folder."""

    def __init__(self, folder: Path, first_step: int, config: TrainConfig) -> None:
        """Open the folder. Events from `first_step` on, that of the first row to come, are no longer shown."""
        from torch.utils.tensorboard import SummaryWriter  # takes 1.5 s to import

        self._writer = SummaryWriter(str(folder), purge_step=first_step)
        self._writer.add_text("configuration", indent(dump_config(config), "    "), first_step)  # indented: as it is

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(grouped(name), number, step)

    def close(self, end: End) -> None:
        self._writer.close()


class WandbSink(MetricSink):
    """Writes to a run of Weights & Biases, which stays the same when the training is resumed."""

    def __init__(self, settings: WandbConfig, run_dir: Path, config: TrainConfig) -> None:
        import wandb

        self._run = wandb.init(
            project=settings.project, entity=settings.entity, name=settings.name or run_dir.name, tags=settings.tags,
            id=_identity(run_dir), resume="allow", dir=str(run_dir), config=config_to_dict(config),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")  # a resumed run may go back in steps, wandb's own count cannot

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{grouped(name): number for name, number in numbers.items()}})

    def close(self, end: End) -> None:
        self._run.finish(exit_code=end.value)


class MlflowSink(MetricSink):
    """Writes to a run of MLflow, which stays the same when the training is resumed.

    MLflow's environment variables name the server.
    """

    def __init__(self, experiment: str, run_dir: Path, config: TrainConfig) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        self._sent: Any = None  # newest asynchronous request; they are sent in order
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        tag = _identity(run_dir)
        earlier = self._client.search_runs([number], f"tags.megatrain_run = '{tag}'")
        if earlier:
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
            return
        self._run = self._client.create_run(number, run_name=run_dir.name, tags={"megatrain_run": tag}).info.run_id
        params = [Param(key, str(value)[:MOST_CHARS]) for key, value in leaves(config_to_dict(config))]
        for at in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run, params=params[at : at + MOST_PARAMS])

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(grouped(name), number, now_ms, step) for name, number in numbers.items()]
        self._sent = self._client.log_batch(self._run, metrics, synchronous=False)  # a slow server must not delay steps

    def close(self, end: End) -> None:
        if self._sent:
            self._sent.wait()
        self._client.set_terminated(self._run, status=end.name)


def check_packages(config: TrainConfig) -> None:
    """Raise ConfigError if a tracker is configured whose package is not installed. Call before anything is started."""
    log = config.log
    for key, package, name, wanted in (
        ("log.wandb", "wandb", "wandb", log.wandb),
        ("log.mlflow", "mlflow", "mlflow-skinny", log.mlflow),
    ):
        if wanted is not None and find_spec(package) is None:
            raise ConfigError(
                f"{key}: the package {package} is not installed: pip install {name}, or leave the key out"
            )


@contextmanager
def open_sinks(config: TrainConfig, run_dir: Path, first_step: int) -> Iterator[MetricSinks]:
    """Open the sinks that the configuration names, and close them after the block.

    first_step: step of the first row to come.

    Raises ConfigError if a sink cannot be opened.
    """
    opened: dict[str, MetricSink] = {}
    end = End.FAILED
    try:
        for key, name, make in _wanted(config, run_dir, first_step):
            try:
                opened[name] = make()
            except Exception as error:  # whatever a tracker's library raises
                raise ConfigError(
                    f"{key}: cannot be opened ({type(error).__name__}: {error}); {ADVICE.get(key, '')}leave the key out"
                ) from error
        yield MetricSinks(opened)
        end = End.FINISHED
    except (InterruptedRunError, KeyboardInterrupt):
        end = End.KILLED
        raise
    finally:
        for name, sink in opened.items():
            thread = threading.Thread(target=_close, args=(name, sink, end), name=f"closing {name}", daemon=True)
            thread.start()
            thread.join(DEADLINE_S)  # a tracker retries for ever if its server is unreachable
            if thread.is_alive():
                say(f"warning: {name} was not closed within {DEADLINE_S:.0f} s; metrics.jsonl is whole")


def _close(name: str, sink: MetricSink, end: End) -> None:
    try:
        sink.close(end)
    except Exception as error:
        say(f"warning: {name} could not be closed ({type(error).__name__}: {error})")


def _wanted(config: TrainConfig, run_dir: Path, first_step: int) -> Iterator[tuple[str, str, Callable[[], MetricSink]]]:
    settings = config.log
    if settings.tensorboard:
        yield "log.tensorboard", "TensorBoard", lambda: TensorBoardSink(run_dir / "tensorboard", first_step, config)
    if (wandb := settings.wandb) is not None:
        yield "log.wandb", "Weights & Biases", lambda: WandbSink(wandb, run_dir, config)
    if (experiment := settings.mlflow) is not None:
        yield "log.mlflow", "MLflow", lambda: MlflowSink(experiment, run_dir, config)
    if settings.prometheus:
        from megatrain_ray.metrics.ray_sink import RaySink

        plan, run = RunFiles(run_dir).read_plan(), ascii(run_dir.name)[1:-1]  # Ray's tags are ASCII
        yield "log.prometheus", "Ray's metrics", lambda: RaySink(run, config.train.num_steps, plan)


def _identity(run_dir: Path) -> str:
    """Return the id of the run, which is created once and kept in the run directory, whatever becomes of its name."""
    file = run_dir / ID_NAME
    if not file.exists():
        write_atomically(file, f"{uuid.uuid4().hex}\n")
    return file.read_text().strip()
