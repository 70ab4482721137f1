"""Trainer: the driver of a run. It alone knows everything; what it starts knows nothing of each other."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from megatrain_ray.actors import Actors
from megatrain_ray.cluster import cluster, in_ray_job
from megatrain_ray.config import TrainConfig
from megatrain_ray.controller import Action, Observation, RunPolicy
from megatrain_ray.data_worker import open_windows
from megatrain_ray.engine.device import DEADLINE_S
from megatrain_ray.errors import ConfigError, DeadlineError, InterruptedRunError, MegatrainError, ShardFailedError
from megatrain_ray.gpu_worker import Progress
from megatrain_ray.interrupts import Interrupts
from megatrain_ray.io.batches import BatchStream
from megatrain_ray.io.manifest import Manifest
from megatrain_ray.io.save import clean_unfinished, list_saves, load_manifest, save_folder
from megatrain_ray.logs import log_to
from megatrain_ray.planning import Prepared, prepare
from megatrain_ray.progress import ProgressView, make_progress
from megatrain_ray.run_dir import RunDir
from megatrain_ray.saving import save_run

log = logging.getLogger(__name__)

SILENCE_S = 60.0  # without a step's end after which the driver says what it waits for
POLL_S = 0.2  # how often the driver looks whether it was interrupted


@dataclass(frozen=True)
class TrainSummary:
    """`step`: updates of the run so far, earlier processes included. `loss`: of the last one, None when none ran."""

    step: int
    loss: float | None
    run_dir: Path


class Trainer:
    """Trains what a TrainConfig describes; resumes the run when its directory holds one."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def fit(self) -> TrainSummary:
        """Runs to `train.steps`.

        Raises ConfigError (2), CapacityError (3), InterruptedRunError (130, after a save unless `save_every: null`),
        MegatrainError (1) for anything that failed while running.
        """
        if in_ray_job() and not Path(self.config.run_dir).is_absolute():
            raise ConfigError(
                f"run_dir: {self.config.run_dir} is relative, and a Ray job runs in a folder of its own that goes with "
                "it; give an absolute path"
            )
        with RunDir.open(self.config) as run:
            saves = list_saves(run.saves)
            manifest = load_manifest(run.saves, saves[-1]) if saves else None
            if manifest is not None and manifest.step >= run.config.train.steps:
                return TrainSummary(manifest.step, None, run.path)
            prepared = prepare(run.config)
            _check_inputs(prepared, manifest)
            return _run(prepared, run, manifest)


def _check_inputs(prepared: Prepared, manifest: Manifest | None) -> None:
    """Everything that can be wrong with files, before anything is written or started. Raises ConfigError."""
    config = prepared.config
    prepared.source.check_weights(prepared.structure)
    windows = open_windows(config.data, config.tokenizer, prepared.structure.vocab_size)
    if manifest is not None:
        _check_same_model(manifest, prepared)
        BatchStream(windows, batch_size=1, shuffle=False, seed=0).seek(manifest.data)


def _run(prepared: Prepared, run: RunDir, manifest: Manifest | None) -> TrainSummary:
    clean_unfinished(run.saves)
    plan = prepared.plan
    run.begin(plan.to_json(), manifest.step if manifest else 0)
    with (
        log_to(run.logs / "driver.log"),
        Interrupts() as interrupts,
        cluster(plan.num_compute_threads, 1 if plan.device == "cuda" else 0),
    ):
        interrupts.listen()
        log.info("step %d of %d, %s", manifest.step if manifest else 0, run.config.train.steps, plan.device)
        return _Session(prepared, run, interrupts, manifest).train()


class _Session:
    """One process's part of a run: from the actors' start to their end."""

    def __init__(self, prepared: Prepared, run: RunDir, interrupts: Interrupts, manifest: Manifest | None) -> None:
        self._prepared = prepared
        self._run = run
        self._interrupts = interrupts
        self._manifest = manifest
        config = prepared.config
        self._policy = RunPolicy(config.train.steps, config.save_every)
        step = manifest.step if manifest else 0
        self._submitted = self._completed = step
        self._saved = step if manifest else -1
        self._under_way: list[Any] = []
        self._last_row: dict[str, Any] = {}
        self._heard_s = time.monotonic()

    def train(self) -> TrainSummary:
        actors = Actors.start(self._prepared, self._data_arguments())
        try:
            self._begin(actors)
            with make_progress(self._prepared.config.train.steps, self._completed) as view:
                self._loop(actors, view)
            actors.stop()
        except (RayTaskError, RayActorError, GetTimeoutError) as error:
            log.error("after step %d", self._completed, exc_info=error)
            raise _understood(error, actors) from error
        finally:
            actors.kill()
        if self._interrupts.requested and self._completed < self._prepared.config.train.steps:
            saved = f"saved at step {self._saved}" if self._saved == self._completed else "nothing saved"
            raise InterruptedRunError(f"interrupted after step {self._completed}, {saved}; the same command resumes")
        loss = self._last_row.get("loss")
        return TrainSummary(self._completed, loss, self._run.path)

    def _begin(self, actors: Actors) -> None:
        manifest = self._manifest
        folder = None if manifest is None else save_folder(self._run.saves, manifest.step)
        actors.load(folder, manifest)
        actors.begin(Progress(self._completed, manifest.optimizer_step if manifest else 0))

    def _loop(self, actors: Actors, view: ProgressView) -> None:
        while True:
            seen = Observation(self._submitted, self._completed, self._saved, self._interrupts.requested)
            match self._policy.tick(seen):
                case Action.STEP:
                    self._submitted += 1
                    self._under_way.append(actors.gpu.step.remote(self._submitted))
                case Action.SAVE:
                    save_run(self._prepared, actors, self._run.saves, self._completed)
                    log.info("saved step %d", self._completed)
                    self._saved = self._completed
                case Action.WAIT:
                    self._wait(actors, view)
                case Action.STOP:
                    return

    def _wait(self, actors: Actors, view: ProgressView) -> None:
        """Until a step ends, or something that should not end does, or a moment has passed."""
        ended, _ = ray.wait([self._under_way[0], *actors.serving], num_returns=1, timeout=POLL_S)
        self._report_silence(ended)
        for reference in ended:
            answer = ray.get(reference)
            if reference == self._under_way[0]:
                self._under_way.pop(0)
                self._record(answer, view)
            else:
                raise MegatrainError("an optimizer shard stopped serving before the run was over")

    def _report_silence(self, ended: list[Any]) -> None:
        """Says what the run waits for when nothing has ended for a while."""
        now = time.monotonic()
        if ended:
            self._heard_s = now
        elif now - self._heard_s > SILENCE_S:
            self._heard_s = now
            message = f"still waiting for step {self._completed + 1}: nothing ended in {SILENCE_S:.0f} s"
            log.warning(message)
            print(message, file=sys.stderr, flush=True)

    def _record(self, row: dict[str, Any], view: ProgressView) -> None:
        self._completed = row["step"]
        self._last_row = row
        self._run.append(row)
        view.update(row)

    def _data_arguments(self) -> dict[str, Any]:
        config, plan = self._prepared.config, self._prepared.plan
        return {
            "data": config.data,
            "tokenizer": config.tokenizer,
            "vocab_size": self._prepared.structure.vocab_size,
            "batch_size": plan.micro_batch_size * plan.num_micro_batches,
            "step": self._completed,
            "position": self._manifest.data if self._manifest else None,
        }


def _check_same_model(manifest: Manifest, prepared: Prepared) -> None:
    ours = tuple((layer.name, layer.num_parameters) for layer in prepared.plan.layers)
    theirs = tuple((layer.name, layer.logical_size) for layer in manifest.layers)
    if ours != theirs:
        raise ConfigError(
            f"run_dir holds a run of another model: its layers are {theirs[:3]}…, this model's {ours[:3]}…; use "
            "another run_dir"
        )


def _understood(error: Exception, actors: Actors) -> MegatrainError:
    """What the user should read: our own message where an actor raised one; a shard's own before what followed."""
    for failure in (*actors.failures(), error):
        cause = failure.cause if isinstance(failure, RayTaskError) else failure
        if isinstance(cause, MegatrainError) and not isinstance(cause, ShardFailedError):
            return cause
        if isinstance(cause, RayActorError):
            return MegatrainError(
                f"a process of the run died ({actors.name_of(cause.actor_id)}); the same command resumes from the last "
                "save"
            )
        if isinstance(cause, GetTimeoutError):
            return DeadlineError(f"an actor did not answer within {DEADLINE_S:.0f} s: {cause}")
    return MegatrainError(f"an actor failed: {type(error).__name__}: {error}")
