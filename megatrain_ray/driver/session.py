"""Runs one attempt at a run, from the start of its actors to their end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from megatrain_ray.console.logs import say
from megatrain_ray.console.progress import LineView, describe_split, make_progress
from megatrain_ray.console.stall_watch import StallWatch
from megatrain_ray.crew.gpu_worker_group import PreparedSteps
from megatrain_ray.crew.placement import Placement
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.driver.plan_check import PlanCheck
from megatrain_ray.driver.policy import Action, Observation, RunPolicy
from megatrain_ray.driver.run_context import RunContext
from megatrain_ray.driver.run_saves import RunSaves
from megatrain_ray.driver.running_evaluation import RunningEvaluation
from megatrain_ray.driver.start_processes import start_processes
from megatrain_ray.driver.tracing import Tracing
from megatrain_ray.errors import InterruptedRunError, LostDeviceError, MegatrainError, SamplingError
from megatrain_ray.io.files.disk_errors import DiskFullError
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_folder import list_saves
from megatrain_ray.metrics.sink import DeathRecorder, MetricSinks
from megatrain_ray.rollouts.running_rollouts import RunningRollouts
from megatrain_ray.rollouts.server_check import ServerCheck
from megatrain_ray.run.best_evaluation import num_without_better
from megatrain_ray.run.run_history import History
from megatrain_ray.run.run_processes import forget, record
from megatrain_ray.spans import Row
from megatrain_ray.workers.messages import Progress, StepResult

log = logging.getLogger(__name__)

NOTICE_S = 10.0  # seconds within which Ray notices that a node is gone, after it has missed a process there
TOKEN_DEADLINE_S = 10.0  # a guess: seconds for which all weights may stream for one token of a batch
POLL_S = 0.2  # seconds between two checks whether the run was interrupted


class Session:
    """Runs the driver's loop: steps, saves and evaluations, and what is to be done when a process dies."""

    _view: LineView  # exists while the loop runs

    def __init__(
        self, context: RunContext, manifest: Manifest | None, sinks: MetricSinks, placement: Placement | None = None
    ) -> None:
        """Prepare an attempt that goes on from the save of `manifest`; None: from the start.

        placement: holds actors that have started already. They end with the session.
        """
        self._context = context
        self._manifest = manifest
        self._sinks = sinks
        self._config, self._plan, run = context.run_spec.config, context.run_spec.plan, context.run
        self._policy = RunPolicy.of(self._config)
        step = manifest.step if manifest else 0
        self._progress = Progress(step, manifest.optimizer_step if manifest else 0)
        self._submitted = step
        self._last_applied = step  # the newest step that was not skipped
        self._last_row: dict[str, Any] = {}
        self._under_way: list[Any] = []  # calls of the steps that were submitted and have not ended
        # Opened once: packing chats takes a while.
        self._held_out = context.held_out.open() if context.held_out else None
        self._evaluation: RunningEvaluation | None = None
        self._rollouts: RunningRollouts | None = None
        self._is_evaluation = False  # whether `_rollouts` answers held-out prompts
        self._sampled = -1  # updates before the newest sampling whose rollouts are there
        self._sampling_summary: dict[str, Any] = {}  # what rows of metrics have of it
        self._failure: MegatrainError | None = None  # of a sampling: the run saves before it ends
        self._evaluated, self._num_without_better = run.last_evaluated, num_without_better(run.evaluations())
        watch = DeathRecorder(History(run.path), sinks, lambda: self._progress.step)
        to_record = partial(record, run.path)
        self._crew = WorkerGroup(
            context.run_spec, context.daemons.check, to_record, placement, context.failures, watch, context.left
        )
        self._prepared = PreparedSteps(self._crew.ask_prepared, step, streamed=context.streamed is not None)
        self._stall = StallWatch(self._crew.current_phase)
        self._tracing = Tracing(context.run_spec, run.path, step)
        self._plan_check = PlanCheck(self._plan, run.path)
        self._server_check = ServerCheck(self._config.train)
        self._saves = RunSaves(context, self._crew, manifest, self._tracing.spans)

    def train(self) -> int:
        """Train until the run is done, interrupted or stopped by a callback. Return the completed steps.

        Raises InterruptedRunError, and MegatrainError for what failed.
        """
        crew, interrupts = self._crew, self._context.interrupts
        try:
            self._start()
            with interrupts.put_off():
                steps, every = self._config.train.num_steps, self._config.log.every
                with make_progress(steps, self._progress.step, every=every) as self._view:
                    self._loop()
                self._tracing.finish(crew, self._progress.step)
                self._plan_check.finish(crew)
                crew.stop()
        except RayError as error:
            log.error("after step %d", self._progress.step, exc_info=error)
            # A lost process or device may have died with its node. Any other error already says what is wrong.
            lost = isinstance(error, RayActorError) or isinstance(getattr(error, "cause", None), LostDeviceError)
            crew.check(NOTICE_S if lost else 0.0)
            raise crew.explain(error) from error
        finally:
            self._saves.end()
            crew.kill()
            self._context.left.clear()
            self._context.left.update(crew.remote_pids)
            self._tracing.close()
            self._plan_check.close()
        forget(self._context.run.path)
        completed = self._progress.step
        if interrupts.requested and not self._policy.is_done(self._seen()):
            raise InterruptedRunError(f"interrupted after step {completed}, {self._saves.kept(completed)}")
        if self._context.callbacks.stop:
            say(f"a callback ended the training after step {completed}, {self._saves.kept(completed)}")
        elif reason := self._context.run.early_end(completed):
            say(reason)
        return completed

    def _start(self) -> None:
        if self._context.rollouts:  # before the first batch is asked for, which may be of rollouts that are there
            self._sampled, self._sampling_summary = self._context.rollouts.resume(self._progress.step)
        self._saves.rates = start_processes(self._crew, self._context, self._manifest, lambda: self._progress)
        if not self._policy.is_done(self._seen()):
            steps = self._config.train.num_steps
            next_step = self._progress.step + 1
            scores = "computing log-probabilities" if self._context.run_spec.keeps_logprobs else "evaluating"
            self._context.startup.tell(f"step {next_step} of {steps}" if next_step <= steps else scores)
        self._stall.reset()

    def _loop(self) -> None:
        while (action := self._policy.tick(seen := self._seen())) is not Action.STOP:
            self._act(action, seen)
        self._check_diverged()
        if self._failure is not None:
            raise MegatrainError(f"{self._failure}; {self._saves.kept(self._progress.step)}") from self._failure
        if self._policy.is_done(seen):
            self._context.at_end(self._context, self._crew)

    def _act(self, action: Action, seen: Observation) -> None:
        match action:
            case Action.STEP:
                save = self._policy.saves_next(seen)
                self._submitted += 1
                if save:
                    self._saves.begin(self._submitted, self._progress.step, self._last_row)
                self._under_way.append(self._crew.step(self._submitted, save))
            case Action.EVALUATE if self._context.rollouts:
                self._rollouts = self._context.rollouts.begin_evaluation(self._progress.step, self._crew.sample)
                self._is_evaluation = True
            case Action.EVALUATE:
                assert self._context.held_out and self._held_out  # it is evaluated only if there are some
                self._evaluation = RunningEvaluation(
                    self._crew.evaluate, self._held_out, self._context.held_out.weights, self._progress.step,
                    self._context.keep,
                )  # fmt: skip
            case Action.SAMPLE:
                assert self._context.rollouts  # else the policy samples none
                self._rollouts = self._context.rollouts.begin(self._progress.step, self._crew.sample, self._crew.score)
                self._is_evaluation = False
            case Action.SAVE:
                self._saves.begin(self._progress.step, self._progress.step, self._last_row)
                self._saves.reached(self._progress)
            case Action.WAIT:
                is_idle = not (self._under_way or self._evaluation or self._rollouts)
                if self._saves.running and is_idle and self._policy.saves_next(seen):
                    self._saves.running.note_waiting()
                self._wait_for_all()

    def _seen(self) -> Observation:
        callbacks = self._context.callbacks
        return Observation(
            submitted=self._submitted,
            completed=self._progress.step,
            saved=self._saves.step,
            interrupted=self._context.interrupts.requested
            or self._has_diverged
            or callbacks.stop
            or bool(self._failure),
            changed=self._progress.adam_step > self._saves.num_applied,
            saving=self._saves.running is not None,
            missed=self._saves.missed or callbacks.save,
            evaluated=self._evaluated,
            evaluating=self._evaluation is not None,
            sampled=self._sampled,
            sampling=self._rollouts is not None,
            wants_evaluation=callbacks.evaluate,
            held_back=self._prepared.holds(self._submitted),
            num_without_better=self._num_without_better,
        )

    def _wait_for_all(self) -> None:
        """Wait as `_wait` does, and replace a process that died or whose device failed."""
        crew, gpu = self._crew, self._crew.gpu
        try:
            self._wait()
        except (RayActorError, RayTaskError) as error:
            crew.recover(error, gpu)
        if crew.gpu is not gpu:
            self._repeat_steps()

    def _repeat_steps(self) -> None:
        """Submit the steps that have not ended to the new GPU workers. A running evaluation is made again.

        So is a sampling, unless only its rewards are missing.
        """
        self._evaluation = None
        if self._rollouts and self._rollouts.calls:
            self._rollouts = None
        saved = self._saves.running.step if self._saves.running else None
        again = range(self._progress.step + 1, self._submitted + 1)
        self._under_way = [self._crew.step(step, step == saved) for step in again]
        self._stall.reset()

    def _wait(self) -> None:
        """Wait until a step, a part of the save or an evaluated batch ends, at most POLL_S seconds, and handle it."""
        crew, evaluation, rollouts = self._crew, self._evaluation, self._rollouts
        parts = self._saves.running.calls if self._saves.running else []
        evaluated = evaluation.calls if evaluation else []
        sampled = rollouts.calls if rollouts else []
        asked = self._prepared.calls(self._submitted)
        rewarding = rollouts is not None and not sampled  # then `is_over` waits
        ended = crew.wait([*self._under_way[:1], *parts, *evaluated, *sampled, *asked], 0.0 if rewarding else POLL_S)
        self._check_stall([call for call in ended if call not in asked])
        self._sinks.keep()
        for call in ended:
            if self._under_way and call == self._under_way[0]:
                self._record(crew.result(call))
                self._under_way.pop(0)
                self._saves.reached(self._progress)
            elif evaluation and call in evaluated:
                evaluation.add_result(call, crew.result(call))
                self._view.advance("evaluating", *evaluation.progress, evaluation.tokens_per_s)
            elif rollouts and call in sampled:
                self._add_sampled(rollouts, call)
            elif call in asked:
                self._record_prepared()
            else:
                self._saves.take_part(call)
        if evaluation:
            self._end_evaluation(evaluation)
        if self._rollouts:
            self._end_sampling(self._rollouts)
        self._saves.commit_complete(self._progress.step)

    def _check_stall(self, ended: list[Any]) -> None:
        save, step = self._saves.running, self._progress.step
        if save:
            save.check_deadline()
        if ended:
            self._stall.reset()
        awaited = f"the evaluation after step {step}" if self._evaluation else f"step {step + 1}"
        # A save may delay a step for as long as the disk needs.
        more_s = self._plan.update_deadline_s if save else 0.0
        if self._rollouts and self._context.rollouts:
            awaited = f"the sampling after step {step}"
            more_s += self._context.rollouts.settings.max_new_tokens * TOKEN_DEADLINE_S
        elif self._prepared.holds(self._submitted) and not (self._under_way or self._evaluation):
            awaited, more_s = f"the data of step {step + 1} (data.stream)", math.inf  # fetching ends by itself
        self._stall.check(awaited, more_s)

    def _record(self, result: StepResult) -> None:
        row, step = self._context.with_epoch(result.row), result.progress.step
        if self._sampling_summary:
            row["rollouts"] = self._sampling_summary
        if self._context.mirror:
            row["mirror_lag"] = self._context.mirror.lag(step)
        self._progress, self._last_row = result.progress, row
        if not row["skipped"]:
            self._last_applied = step
        with self._tracing.spans.span(Row.DRIVER, f"row of step {step}"):
            self._write(self._context.run.append, row)
            log.info("step %d  %s", step, describe_split([row]))
            self._view.update(row)
        self._tracing.ended(self._crew, step)
        self._plan_check.ended(self._crew, row)
        self._server_check.ended(row, self._sampled)
        self._context.callbacks.step_ended(row)

    def _write(self, append: Callable[[Mapping[str, Any]], None], row: Mapping[str, Any]) -> None:
        try:
            append(row)
        except DiskFullError as error:
            raise MegatrainError(
                f"{error}; {self._saves.safe}: free some space, and the same command resumes"
            ) from None
        self._sinks.write(row)

    def _end_evaluation(self, evaluation: RunningEvaluation) -> None:
        """Stop the evaluation if the run is interrupted; write its row if it is over."""
        if self._context.interrupts.requested:
            evaluation.give_up()
        if not evaluation.is_over:
            return
        self._evaluation = None
        if found := evaluation.row():
            self._record_evaluation(found)

    def _record_evaluation(self, found: Mapping[str, Any]) -> None:
        row = self._context.with_epoch(found)
        self._evaluated = row["step"]
        self._write(self._context.run.append_evaluation, row)
        self._num_without_better = num_without_better(self._context.run.evaluations())
        if self._config.train.steps:  # else the result is all that is printed
            self._view.evaluated(row)
        self._context.callbacks.evaluated(row)

    def _add_sampled(self, rollouts: RunningRollouts, call: Any) -> None:
        try:
            rollouts.add_result(self._crew.result(call))
        except RayTaskError as error:
            if not isinstance(error.cause, SamplingError):
                raise
            self._failure, self._rollouts = error.cause, None
            return
        self._view.advance(
            "evaluating" if self._is_evaluation else "sampling", *rollouts.progress, rollouts.tokens_per_s
        )

    def _record_prepared(self) -> None:
        """Record up to which step there are data. If there will be no more, the run saves as if it were interrupted."""
        try:
            self._prepared.record_answer(self._crew.result)
            if not self._prepared.holds(self._submitted):
                self._stall.reset()  # the deadline of the step that begins now leaves out the wait for its data
        except RayTaskError as error:
            if not isinstance(error.cause, MegatrainError):
                raise
            self._failure = error.cause

    def _end_sampling(self, rollouts: RunningRollouts) -> None:
        """Give the sampling up if the run is interrupted; write its rollouts if it is over.

        If a reward function or the disk fails, the run goes on as if it were interrupted.
        """
        if self._context.interrupts.requested:
            rollouts.give_up()
        try:
            if not rollouts.is_over(POLL_S):
                return
            if rollouts.records and self._is_evaluation:
                self._record_evaluation(rollouts.evaluation())
            elif rollouts.records:
                assert self._context.rollouts
                being_saved = [self._saves.running.step] if self._saves.running else []
                self._context.rollouts.commit(rollouts, [*list_saves(self._context.run.saves), *being_saved])
                self._sampled, self._sampling_summary = rollouts.step, rollouts.summary()
                self._view.sampled(rollouts.step, self._sampling_summary)
        except MegatrainError as error:
            self._failure = error
        self._rollouts = None

    @property
    def _has_diverged(self) -> bool:
        """Return whether so many steps in a row were skipped that training does not recover."""
        return self._progress.step - self._last_applied >= self._config.max_skipped

    def _check_diverged(self) -> None:
        """Raise MegatrainError if training has diverged, once the run has saved as if it were interrupted."""
        if self._has_diverged:
            raise MegatrainError(
                f"the last {self._progress.step - self._last_applied} steps were skipped, each for a gradient norm "
                f"that is not finite (max_skipped: {self._config.max_skipped}): training has diverged; "
                f"{self._saves.safe}: look at the data of these steps, or lower train.lr, and the same command resumes"
            )
