"""Runs one attempt at a run, from the start of its actors to their end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from megatrain_ray.console.logs import say
from megatrain_ray.console.progress import ProgressView, make_progress
from megatrain_ray.console.startup import Startup
from megatrain_ray.console.step_split import describe_split
from megatrain_ray.crew.failures import FailureBudget, Faults
from megatrain_ray.crew.placement import Placement
from megatrain_ray.crew.ray_cluster import Daemons, in_ray_job
from megatrain_ray.crew.worker_group import Crew
from megatrain_ray.data.data_worker import HeldOutData
from megatrain_ray.driver.crew_start import SaveRates, start_crew
from megatrain_ray.driver.disk_counts import DiskCounts
from megatrain_ray.driver.failures import understood
from megatrain_ray.driver.interrupts import Interrupts
from megatrain_ray.driver.observers import PlanCheck
from megatrain_ray.driver.policy import Action, Observation, RunPolicy
from megatrain_ray.driver.running_evaluation import RunningEvaluation
from megatrain_ray.driver.running_save import RunningSave
from megatrain_ray.driver.tracing import Tracing
from megatrain_ray.engine.device.deadlines import STEP_DEADLINE_S
from megatrain_ray.engine.measure.save_cost import predict_stall_s
from megatrain_ray.errors import CapacityError, DeadlineError, InterruptedRunError, LostDeviceError, MegatrainError
from megatrain_ray.io.files.disk_errors import DiskFullError
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_writer import NonFiniteStateError
from megatrain_ray.metrics.sinks import MetricSinks
from megatrain_ray.planning.prepare import Prepared
from megatrain_ray.planning.stop_deadline import stop_wait_s, warning_of
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.run.run_history import History
from megatrain_ray.run.run_processes import forget, record
from megatrain_ray.spans import Row, traced_steps
from megatrain_ray.workers.gpu_worker import Progress, StepResult

log = logging.getLogger(__name__)

SILENCE_S = 60.0  # seconds in which nothing ends, after which the driver prints what it waits for
NOTICE_S = 10.0  # seconds within which Ray notices that a node is gone, after it has missed a process there
POLL_S = 0.2  # seconds between two checks whether the run was interrupted


@dataclass(frozen=True)
class Job:
    """Holds what all attempts at a run have in common.

    tokens: folders of the tokens of the data's sources.
    failures: of all attempts together.
    at_end: called when all steps are made, while every process still lives.
    left: processes that the previous attempt left on other hosts, as Crew.elsewhere returns them.
    """

    prepared: Prepared
    tokens: tuple[Path, ...]
    held_out: HeldOutData | None
    run: RunDir
    interrupts: Interrupts
    daemons: Daemons
    startup: Startup
    failures: FailureBudget
    at_end: Callable[[Job, Crew], None] = lambda job, crew: None
    left: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Silence:
    """Measures how long nothing has ended.

    since_s: when something ended last.
    told_s: when that or the last message about the silence was.
    """

    since_s: float = field(default_factory=time.monotonic)
    told_s: float = field(default_factory=time.monotonic)

    def heard(self) -> None:
        self.since_s = self.told_s = time.monotonic()


def _may_be_of_a_node(error: RayError) -> bool:
    """Return whether an error may come from the loss of a whole node.

    It may if a process or a device was lost. Any other error already says what is wrong.
    """
    return isinstance(error, RayActorError) or isinstance(getattr(error, "cause", None), LostDeviceError)


class Session:
    """Runs the driver's loop: steps, saves and evaluations, and what is to be done when a process dies."""

    def __init__(
        self, job: Job, manifest: Manifest | None, sinks: MetricSinks, placement: Placement | None = None
    ) -> None:
        """Prepare an attempt.

        manifest: of the save to go on from; None: from the start.
        placement: holds actors that have started already. They end with the session.
        """
        prepared, run = job.prepared, job.run
        self._job = job
        self._prepared = prepared
        self._tokens = job.tokens
        self._held_out = job.held_out
        self._batches = job.held_out.open() if job.held_out else None  # opened once: packing chats takes a while
        self._run = run
        self._interrupts = job.interrupts
        self._daemons = job.daemons
        self._startup = job.startup
        self._manifest = manifest
        self._placement = placement
        self._sinks = sinks
        self._policy = RunPolicy.of(prepared.config)
        step = manifest.step if manifest else 0
        self._submitted = self._completed = step
        self._progress = Progress(step, manifest.optimizer_step if manifest else 0)
        self._position: Mapping[str, Any] | None = manifest.data if manifest else None
        self._saved = step if manifest else -1
        self._saved_updates = manifest.optimizer_step if manifest else 0
        self._updated = step  # the last step that was not skipped
        self._save: RunningSave | None = None
        self._evaluation: RunningEvaluation | None = None
        self._evaluated = run.last_evaluated
        self._missed = self._told_of_waiting = False
        self._under_way: list[Any] = []
        self._last_row: dict[str, Any] = {}
        self._silence = Silence()
        self._save_rates = SaveRates(0.0, 0.0)
        self._tracing = Tracing(prepared, run.path, step)
        self._plan_check = PlanCheck(prepared.plan, run.path)
        self._disk_counts = DiskCounts(prepared.plan, sinks)

    def train(self) -> tuple[int, float | None]:
        """Train until the run is done or interrupted. Return the completed steps and the last loss.

        The loss is None if no step ran. Raises InterruptedRunError, and MegatrainError for what failed.
        """
        to_record = partial(record, self._run.path)
        watch = Faults(History(self._run.path), self._sinks, lambda: self._completed)
        crew = Crew(
            self._prepared, self._daemons.check, to_record, self._placement, self._job.failures, watch, self._job.left
        )
        try:
            self._start(crew)
            with self._interrupts.put_off():
                with make_progress(self._prepared.config.train.steps, self._completed) as view:
                    self._loop(crew, view)
                self._tracing.finish(crew, self._completed)
                self._plan_check.finish(crew)
                crew.stop()
        except RayError as error:
            log.error("after step %d", self._completed, exc_info=error)
            crew.check(NOTICE_S if _may_be_of_a_node(error) else 0.0)
            raise understood(error, crew) from error
        finally:
            crew.kill()
            self._job.left.clear()
            self._job.left.update(crew.elsewhere)
            self._tracing.close()
            self._plan_check.close()
        forget(self._run.path)
        if self._interrupts.requested and not self._policy.is_done(self._seen()):
            raise InterruptedRunError(f"interrupted after step {self._completed}, {self._kept()}")
        return self._completed, self._last_row.get("loss")

    def _kept(self) -> str:
        """Return what an interrupted run leaves, for the message."""
        if self._saved == self._completed:
            return f"saved at step {self._saved}; the same command resumes"
        if self._prepared.config.save_every is None:
            return "nothing saved (save_every: null)"
        if self._saved >= 0:
            return f"all steps since the save of step {self._saved} were skipped; the same command resumes from it"
        return "nothing saved; the same command resumes"

    def _start(self, crew: Crew) -> None:
        self._save_rates = start_crew(
            crew,
            self._prepared,
            self._run,
            self._manifest,
            lambda: self._progress,
            self._data_arguments,
            self._startup,
        )
        if in_ray_job():
            self._tell_of_stop()
        if not self._policy.is_done(self._seen()):
            self._startup.tell(f"step {self._completed + 1} of {self._prepared.config.train.steps}")
        self._silence.heard()

    def _tell_of_stop(self) -> None:
        """Print a warning if a stopped job would be killed before its last save is complete."""
        config, plan = self._prepared.config, self._prepared.plan
        step_s = plan.prediction.step_s if plan.prediction else 0.0
        needed_s = stop_wait_s(plan, config.save_every, self._save_rates.disk_bytes_per_s, step_s)
        if warning := warning_of(needed_s, os.environ):
            say(warning)

    def _loop(self, crew: Crew, view: ProgressView) -> None:
        while True:
            seen = self._seen()
            match self._policy.tick(seen):
                case Action.STEP:
                    save = self._policy.saves_next(seen)
                    self._submitted += 1
                    if save:
                        self._begin_save(crew, self._submitted)
                    self._under_way.append(crew.step(self._submitted, save))
                case Action.EVALUATE:
                    assert self._held_out and self._batches  # eval_every needs data.eval_path
                    weights = self._held_out.weights
                    self._evaluation = RunningEvaluation(crew.evaluate, self._batches, weights, self._completed)
                case Action.SAVE:
                    self._begin_save(crew, self._completed)
                    self._mark()
                case Action.WAIT:
                    if self._save and not (self._under_way or self._evaluation) and self._policy.saves_next(seen):
                        self._save.hold_up()
                    self._wait_for_all(crew, view)
                case Action.STOP:
                    self._check_diverged()
                    if self._policy.is_done(seen):
                        self._job.at_end(self._job, crew)
                    return

    def _wait_for_all(self, crew: Crew, view: ProgressView) -> None:
        """Wait as `_wait` does, and replace a process that died or whose device failed."""
        gpu = crew.gpu
        try:
            self._wait(crew, view)
        except RayActorError as error:
            crew.replace(error)
        except RayTaskError as error:
            if not isinstance(error.cause, LostDeviceError):
                raise
            if crew.gpu is gpu:  # or it was replaced when another of its calls had failed
                crew.replace_gpu(str(error.cause))
        if crew.gpu is not gpu:
            self._ask_again(crew)

    def _ask_again(self, crew: Crew) -> None:
        """Submit the steps that have not ended to the new GPU workers. A running evaluation is made again."""
        self._evaluation = None
        of_save = self._save.step if self._save else None
        again = range(self._completed + 1, self._submitted + 1)
        self._under_way = [crew.step(step, step == of_save) for step in again]
        self._silence.heard()

    def _seen(self) -> Observation:
        return Observation(
            submitted=self._submitted,
            completed=self._completed,
            saved=self._saved,
            interrupted=self._interrupts.requested or self._has_diverged,
            changed=self._progress.adam_step > self._saved_updates,
            saving=self._save is not None,
            missed=self._missed,
            evaluated=self._evaluated,
            evaluating=self._evaluation is not None,
        )

    def _begin_save(self, crew: Crew, step: int) -> None:
        predicted_s = 0.0
        if self._completed < step < self._prepared.config.train.steps and self._last_row:
            step_s = self._last_row["step_s"]
            predicted_s = predict_stall_s(
                self._prepared.plan, step_s, self._save_rates.disk_bytes_per_s, self._save_rates.copy_bytes_per_s
            )
        try:
            self._save = RunningSave(self._prepared, crew, self._run.saves, self._run.token, step, predicted_s)
        except CapacityError as error:  # exit code 1, since the configuration is not at fault
            raise MegatrainError(f"{error}; {self._safe()}, and the same command resumes") from None
        self._missed = False

    def _safe(self) -> str:
        """Return from where a run that fails can go on, for the message."""
        return f"the save of step {self._saved} is intact" if self._saved >= 0 else "there is no save yet"

    def _wait(self, crew: Crew, view: ProgressView) -> None:
        """Wait until a step, a part of the save or an evaluated batch ends, at most POLL_S seconds, and handle it."""
        parts = self._save.calls if self._save else []
        evaluated = self._evaluation.calls if self._evaluation else []
        ended = crew.wait([*self._under_way[:1], *parts, *evaluated], POLL_S)
        self._watch_silence(crew, ended)
        self._sinks.keep()
        for call in ended:
            if self._under_way and call == self._under_way[0]:
                self._record(crew, crew.result(call), view)
                self._under_way.pop(0)
                self._mark()
            elif self._evaluation and call in evaluated:
                self._evaluation.take(call, crew.result(call))
                view.evaluating(*self._evaluation.progress)
            else:
                self._take_part(crew, call)
        if self._evaluation:
            self._end_evaluation(self._evaluation, view)
        if self._save and self._save.complete:
            self._commit(self._save)

    def _record(self, crew: Crew, result: StepResult, view: ProgressView) -> None:
        self._completed = result.progress.step
        self._progress, self._position = result.progress, result.position
        self._last_row = result.row
        if not result.row["skipped"]:
            self._updated = self._completed
        with self._tracing.spans.span(Row.DRIVER, f"row of step {self._completed}"):
            self._write(self._run.append, result.row)
            log.info("step %d  %s", self._completed, describe_split([result.row]))
            view.update(result.row)
        self._tracing.ended(crew, self._completed)
        self._plan_check.ended(crew, result.row)
        self._disk_counts.ended(crew)

    @property
    def _has_diverged(self) -> bool:
        """Return whether so many steps in a row were skipped that training does not recover."""
        return self._completed - self._updated >= self._prepared.config.max_skipped

    def _check_diverged(self) -> None:
        """Raise MegatrainError if training has diverged.

        By then the run has ended as if it were interrupted: updates since the newest save are saved.
        """
        if self._has_diverged:
            raise MegatrainError(
                f"the last {self._completed - self._updated} steps were skipped, each for a gradient norm that is not "
                f"finite (max_skipped: {self._prepared.config.max_skipped}): training has diverged; {self._safe()}: "
                "lower train.lr or look at the data of these steps, and start again in another run_dir"
            )

    def _write(self, append: Callable[[Mapping[str, Any]], None], row: Mapping[str, Any]) -> None:
        try:
            append(row)
        except DiskFullError as error:
            raise MegatrainError(f"{error}; {self._safe()}: free some space, and the same command resumes") from None
        self._sinks.write(row)

    def _end_evaluation(self, evaluation: RunningEvaluation, view: ProgressView) -> None:
        """Stop the evaluation if the run is interrupted; write its row if it is over."""
        if self._interrupts.requested:
            evaluation.give_up()
        if not evaluation.is_over:
            return
        self._evaluation = None
        if row := evaluation.row():
            self._evaluated = evaluation.step
            self._write(self._run.append_evaluation, row)
            view.evaluated(row)

    def _take_part(self, crew: Crew, call: Any) -> None:
        """Take a part of the save, which a shard has written.

        If the shard died meanwhile, the save is abandoned and made again later. Raises MegatrainError if the state is
        not finite, and what the shard raised.
        """
        save = self._save
        if save is None or call not in save.calls:
            return
        try:
            save.take(call)
        except RayActorError as error:
            crew.replace(error)
            save.abandon()
            say(f"the save of step {save.step} was abandoned; the next one follows with the next step")
            self._save, self._missed = None, True
        except RayTaskError as error:
            self._save = None
            save.abandon()
            if isinstance(error.cause, NonFiniteStateError):
                raise MegatrainError(
                    f"step {save.step} cannot be saved: {error.cause}, so training has diverged; {self._safe()}: lower "
                    "train.lr, and start again in another run_dir"
                ) from None
            raise

    def _mark(self) -> None:
        """Give the save the progress and data position at the end of its step.

        Its last part may be written many steps later.
        """
        if self._save and self._save.step == self._completed:
            assert self._position is not None  # steps were made, or nothing would be saved
            self._save.reached(self._progress, self._position)

    def _commit(self, save: RunningSave) -> None:
        """Commit a complete save, unless all steps since the newest one were skipped: then drop it."""
        if save.num_updates <= self._saved_updates:
            self._save = None
            save.abandon()
            log.info("step %d is not saved: no step since the newest save changed the weights", save.step)
            return
        self._run.settle()  # a save never exists without the rows before it
        with self._tracing.spans.span(Row.DRIVER, f"commit save {save.step}"):
            timing = save.commit()
        self._saved, self._saved_updates, self._save = save.step, save.num_updates, None
        log.info("saved step %d: %s", save.step, timing)
        if save.held_up_s and self._completed < self._prepared.config.train.steps:
            tell = log.info if self._told_of_waiting else say
            tell(
                f"the next save was due before that of step {save.step} was written ({timing.write_s:.1f} s): training "
                f"waited {save.held_up_s:.1f} s for it; a larger save_every avoids that"
            )
            self._told_of_waiting = True

    def _watch_silence(self, crew: Crew, ended: list[Any]) -> None:
        """Print what the run waits for if nothing has ended for SILENCE_S seconds.

        Raises DeadlineError if nothing has ended for STEP_DEADLINE_S seconds, or longer while a save may delay a step.
        """
        if self._save:
            self._save.check_deadline()
        if ended:
            self._silence.heard()
        now_s = time.monotonic()
        awaited = f"the evaluation after step {self._completed}" if self._evaluation else f"step {self._completed + 1}"
        if now_s - self._silence.told_s > SILENCE_S:
            self._silence.told_s = now_s
            say(f"still waiting for {awaited}: {crew.whereabouts()}")
        # A save may delay a step for as long as the disk needs.
        limit_s = STEP_DEADLINE_S + (self._prepared.plan.update_deadline_s if self._save else 0.0)
        if now_s - self._silence.since_s > limit_s:
            raise DeadlineError(f"{awaited} did not end within {limit_s:.0f} s: {crew.whereabouts()}")

    def _data_arguments(self) -> dict[str, Any]:
        config, plan = self._prepared.config, self._prepared.plan
        return {
            "data": config.data,
            "tokens": self._tokens,
            "vocab_size": self._prepared.structure.vocab_size,
            "batch_size": plan.batch_size,
            "num_readers": plan.hosts.num_gpus,
            "step": self._completed,
            "position": self._position,
            "held_out": self._held_out,
            "traced": traced_steps(config.log.trace),
        }
