"""Runs a configuration from its first check to its output. Only this knows all components; they know nothing of it."""

from __future__ import annotations

import os
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.interrupts import Interrupts
from megatrain_ray.console.logs import say
from megatrain_ray.console.start_summary import describe_pass
from megatrain_ray.console.startup import Startup
from megatrain_ray.crew.ray_cluster import in_ray_job
from megatrain_ray.crew.recovery import FailureBudget
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.data.image_features import find_features
from megatrain_ray.data.python_objects import Objects
from megatrain_ray.driver.attempts import train
from megatrain_ray.driver.callbacks import Callbacks
from megatrain_ray.driver.logprob_pass import LogprobFolders, LogprobPass, find_or_make
from megatrain_ray.driver.run_context import DataTokens, RunContext, check_inputs, check_position
from megatrain_ray.driver.start_processes import ray_processes
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.objectives.distillation import TopTokens
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.errors import InterruptedRunError
from megatrain_ray.export.evaluation_config import (
    evaluation_config,
    identity_of,
    naming_reference,
    pass_config,
    tower_of,
)
from megatrain_ray.export.export import SaveChoice
from megatrain_ray.export.online_reference import open_reference, reference_weights
from megatrain_ray.export.teacher import find_teacher
from megatrain_ray.io.images.feature_files import NO_FEATURES, FeatureFolders
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.tokens.cache_pruning import held
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.model.open_model import read_model
from megatrain_ray.planning.run_spec import RunSpec, prepare
from megatrain_ray.report.html_report import report_at_end
from megatrain_ray.rollouts.run_rollouts import open_rollouts
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.run.run_model import check_model
from megatrain_ray.run.run_processes import await_end, wait_gone
from megatrain_ray.run.train_output import TrainOutput
from megatrain_ray.start_of_run import (
    begin_run,
    check_absolute,
    check_model_for_data,
    describe_run,
    measured_machine,
    opened_run,
    output_if_done,
    report_formats,
    tokenize_all,
)


class TrainingRun:
    """Prepares a run and drives it to its end; goes on with one that its directory holds."""

    def __init__(
        self, config: TrainConfig, objects: Objects = Objects(), callbacks: Callbacks | None = None, *,  # noqa: B008, it is frozen
        base: ModelConfig | None = None, tower: ModelConfig | None = None, missing: LogprobPass | None = None,
        startup: Startup | None = None,
    ) -> None:  # fmt: skip
        """Take the settings.

        objects: of a program, in place of files.
        base: the model of train.reference: model; None: the run's own.
        tower: the model whose tower makes features of images; None: the run's own.
        missing: what the evaluation is for, if this is no run of the user's.
        startup: of a run that this is a part of.
        """
        self.config = config
        self._objects = objects
        self._callbacks = callbacks or Callbacks()
        self._base = base
        self._tower = tower
        self._pass = missing
        self._startup = startup

    def run(self) -> TrainOutput:
        """Make the updates that are missing. Raises as `Trainer.train`."""
        if in_ray_job():
            check_absolute(self.config)
        startup = self._startup or Startup()
        with ExitStack() as stack:
            interrupts = stack.enter_context(Interrupts(saves=self.config.save_every is not None))
            run, mirror = stack.enter_context(opened_run(self.config))
            await_end(run.path)
            manifest = run.newest_save()
            stack.enter_context(self._objects.written(run))
            if not run.config.counts_epochs and (output := output_if_done(run, manifest, self.config)):
                return output
            after = stack.enter_context(ExitStack())  # callbacks for when every process has ended
            source = read_model(run.config.model)  # a missing model is reported before anything is started
            check_model_for_data(run.config, source)
            reference = stack.enter_context(open_reference(run.config, source))
            data = self._data(run, source, manifest, startup)
            # Known only now if the configuration counts epochs.
            if output := output_if_done(run, manifest, self.config):
                return output
            check_position(run.config, data, source.written_vocab_size, manifest)
            teacher = self._pass.teacher if self._pass else find_teacher(run.config, source)
            logprobs = LogprobFolders() if self._pass else self._reference(run, data, startup, teacher)
            rollouts = stack.enter_context(open_rollouts(run.config, run.path, data.training, data.held_out, source))
            machine = measured_machine(run.config, startup)
            features = self._features(run, source, data, machine, startup)
            daemons, placement = stack.enter_context(ray_processes(run.config, machine, startup))
            with startup.phase("reading the model's configuration"):
                run_spec = self._planned(run, machine, source)
            report_formats(run_spec.plan, manifest)
            held_out = check_inputs(run_spec, data, manifest, startup)
            run_spec = replace(
                run_spec, weighted=data.weighted, keeps_logprobs=self._pass is not None,
                teacher=teacher,
                reference=reference_weights(
                    run.config, self._base or run.config.model, run_spec, run.path, reference
                ),
                weights_folder=rollouts.weights_folder if rollouts else None, features=features,
            )  # fmt: skip
            run.report_resume(manifest)
            leftovers = run_spec.source.leftovers()
            describe_run(run_spec, data, manifest, self.config.train.epochs, leftovers)
            held_out = held_out and replace(held_out, logprobs=logprobs.held_out)
            context = RunContext(
                run_spec, data.training, data.counts.num_rows, held_out, run, interrupts, daemons, startup,
                FailureBudget(run.config.max_failures), self._callbacks, self._at_end, logprobs.training, rollouts,
                mirror, streamed=data.streamed,
            )  # fmt: skip
            if self._pass and held_out:
                context = replace(context, held_out=self._pass.evaluated(held_out), keep=self._pass.keep)
            with held(context.token_folders):
                after.callback(run.clean_after_end)
                begin_run(run_spec, run, manifest, leftovers, mirror)
                with report_at_end(run.path):
                    return TrainOutput.of(run, *train(context, manifest, placement))

    def _data(self, run: RunDir, source: ModelSource, manifest: Manifest | None, startup: Startup) -> DataTokens:
        """Return the tokens of the data, and decide in the run's settings what depends on them. Raises as read_data."""
        if self._pass:
            data = self._pass.data
        else:
            position = manifest.data if manifest else None
            run.config, data = tokenize_all(run.config, source.written_vocab_size, run.path, startup, position)
        run.config = run.config.with_steps(data.counts.num_rows)
        return data

    def _reference(self, run: RunDir, data: DataTokens, startup: Startup, teacher: TopTokens | None) -> LogprobFolders:
        """Return the log-probabilities of the reference or teacher; empty if there is none. Raises as compute_logprobs.

        teacher: as for compute_logprobs.
        """
        name = run.config.train.reference_model
        if name is None or run.config.train.rollouts:  # answers that are sampled later get theirs then
            return LogprobFolders()
        role = "teacher" if teacher else "reference"
        startup.tell(f"log-probabilities of the {role} ({name})")
        lost = (
            f"warning: the {role}'s log-probabilities of this run are not in the cache any more: the files of the "
            f"{role} or the data have changed, or nothing used them for long; they are computed again"
        )
        reference, base = None if name == "model" else name, self._base or run.config.model
        config, note = run.config.model_copy(update={"model": base}), lost if run.has_begun else None
        with naming_reference(config.train) if reference else nullcontext():
            return compute_logprobs(reference, config, data, run.path, note=note, teacher=teacher, startup=startup)

    def _features(
        self, run: RunDir, source: ModelSource, data: DataTokens, machine: Machine, startup: Startup
    ) -> FeatureFolders:
        """Return the features of the images in the data; none if there are no images. Raises as find_features."""
        if not run.config.data.images:
            return NO_FEATURES
        held_out = tuple(self._pass.writers) if self._pass else data.held_out or ()
        if self._tower:
            source = read_model(self._tower)
        identity = identity_of(None, run.config.model_copy(update={"model": self._tower or run.config.model}))
        training = data.training if run.config.train.steps else ()  # an evaluation has no steps
        folders = (*training, *held_out)
        found = find_features(run.config, source, identity, folders, machine.device, run.path, startup)
        return FeatureFolders(*(tuple(found[folder] for folder in part) for part in (training, held_out)))

    def _planned(self, run: RunDir, machine: Machine, source: ModelSource) -> RunSpec:
        """Plan the run. Raises as prepare, and ConfigError if the directory holds a run of another model."""
        run_spec = self._prepare(run.config, machine, source)
        run.config = run_spec.config
        if run.has_begun:
            check_model(run.path, run_spec.source.config, run_spec.structure)
        return run_spec

    def _prepare(self, config: TrainConfig, machine: Machine, source: ModelSource) -> RunSpec:
        return prepare(config, machine, source)

    def _at_end(self, context: RunContext, crew: WorkerGroup) -> None:
        """Do something when all steps are made, while every process still lives."""


class _PassRun(TrainingRun):
    """Runs a pass for log-probabilities, and notes the processes of this host that do."""

    pids: frozenset[int] = frozenset()

    def _prepare(self, config: TrainConfig, machine: Machine, source: ModelSource) -> RunSpec:
        run_spec = super()._prepare(config, machine, source)
        assert self._pass and run_spec.scores_s is not None  # it has no steps
        say(f"time      {describe_pass(run_spec.plan, run_spec.scores_s, self._pass.num_rows)}")
        return run_spec

    def _at_end(self, context: RunContext, crew: WorkerGroup) -> None:
        self.pids = frozenset(crew.pids.values()) - {os.getpid()}


def evaluate_model(name: str, config: TrainConfig, step: SaveChoice = None) -> dict[str, Any]:
    """Return the row of an evaluation without step and epoch. The arguments are those of evaluation_config."""
    with evaluation_config(name, config, step) as settings:
        run = TrainingRun(settings, base=config.model, tower=tower_of(name))  # its model is the one that is evaluated
        row = dict(run.run().evaluations[-1])
    del row["step"], row["epoch"]
    return row


def compute_logprobs(
    name: str | None, config: TrainConfig, data: DataTokens, run_dir: Path, step: SaveChoice = None, *,
    note: str | None = None, teacher: TopTokens | None = None, startup: Startup | None = None,
) -> LogprobFolders:  # fmt: skip
    """Return the folders of a model's log-probabilities of all targets of the data, made by a pass if missing.

    The pass is a run of its own: all its processes have ended when this returns.

    name, step: the model, as for pass_config.
    config: of the data, with marks and commits decided.
    data: its tokens. Held-out ones are included unless they are None.
    run_dir: where folders go if the user's cache cannot be written to.
    note: is printed before a pass.
    teacher: what is recorded of the model's predictions as well; None: nothing.
    startup: reports the phases of the pass as well, with the seconds since the start that it is a part of.

    Raises as `Trainer.train` and export_run. If it is interrupted, the next call goes on where it stopped.
    """

    def make(missing: LogprobPass) -> None:
        if note:
            say(note)
        with pass_config(name, config, step) as settings:
            run = _PassRun(settings, tower=tower_of(name), missing=missing, startup=startup)
            try:
                row = run.run().evaluations[-1]
            except InterruptedRunError:
                raise InterruptedRunError(
                    "interrupted in a pass for log-probabilities; those that are computed are kept, and the same "
                    "command goes on"
                ) from None
        for pid in run.pids:  # where the cluster goes on, Ray does not wait for them
            wait_gone(pid, DEADLINE_S)
        say(missing.describe(row["eval_s"]))

    return find_or_make(config, data, identity_of(name, config, step), run_dir, make, teacher)
