"""Begins, commits and abandons the saves of one attempt at a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from megatrain_ray.console.logs import say
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.driver.run_context import RunContext
from megatrain_ray.driver.running_save import RunningSave
from megatrain_ray.driver.start_processes import SaveRates
from megatrain_ray.engine.measure.save_cost import predict_stall_s
from megatrain_ray.errors import CapacityError, MegatrainError
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_writer import NonFiniteStateError
from megatrain_ray.spans import Row, SpanLog
from megatrain_ray.workers.messages import Progress

log = logging.getLogger(__name__)


class RunSaves:
    """Tracks the newest save of a run, and the one that is being written.

    step: updates in the newest save; -1: there is none.
    num_applied: those of them that changed the weights.
    running: the save that is being written.
    missed: the last save that was begun was abandoned.
    rates: from which the stall of a save is predicted; set before the first save.
    """

    def __init__(self, job: RunContext, crew: WorkerGroup, manifest: Manifest | None, spans: SpanLog) -> None:
        """Prepare to save. `manifest`: of the save that the attempt goes on from; None: there is none."""
        self._job = job
        self._crew = crew
        self._spans = spans
        self.step = manifest.step if manifest else -1
        self.num_applied = manifest.optimizer_step if manifest else 0
        self.running: RunningSave | None = None
        self.missed = False
        self.rates = SaveRates()
        self._has_told_of_waiting = False

    def begin(self, step: int, completed: int, last_row: Mapping[str, Any]) -> None:
        """Begin the save of a step, which may not have run yet. Raises MegatrainError if there is no room for it.

        last_row: of metrics; empty: no step has ended.
        """
        run_spec, predicted_s = self._job.run_spec, 0.0
        if completed < step < run_spec.config.train.steps and last_row:
            predicted_s = predict_stall_s(run_spec.plan, last_row["step_s"], *self.rates)
        try:
            self.running = RunningSave(self._job, self._crew, step, predicted_s)
        except CapacityError as error:  # exit code 1, since the configuration is not at fault
            raise MegatrainError(f"{error}; {self.safe}, and the same command resumes") from None
        self.missed = False

    def reached(self, progress: Progress) -> None:
        """Tell the running save where training stands, if it is the save of this step."""
        if self.running and self.running.step == progress.step:
            self.running.reached(progress)

    def take_part(self, call: Any) -> None:
        """Take a part of the running save, which a shard has written.

        If the shard died meanwhile, the save is abandoned and made again later. Raises MegatrainError if the state is
        not finite, and what the shard raised.
        """
        save = self.running
        if save is None or call not in save.calls:
            return
        try:
            save.take(call)
        except RayActorError as error:
            self._crew.recover(error)
            self._abandon(save)
            self.missed = True
            say(f"the save of step {save.step} was abandoned; the next one follows with the next step")
        except RayTaskError as error:
            self._abandon(save)
            if isinstance(error.cause, NonFiniteStateError):
                raise MegatrainError(
                    f"step {save.step} cannot be saved: {error.cause}, so training has diverged; {self.safe}: lower "
                    "train.lr, and start again in another run_dir"
                ) from None
            raise

    def _abandon(self, save: RunningSave) -> None:
        self.running = None
        save.abandon()

    def commit_complete(self, completed: int) -> None:
        """Commit the running save if it is complete. If all steps since the newest one were skipped, drop it."""
        save = self.running
        if save is None or not save.complete:
            return
        if save.num_updates <= self.num_applied:
            self._abandon(save)
            log.info("step %d is not saved: no step since the newest save changed the weights", save.step)
            return
        self._job.run.settle()  # a save never exists without the rows before it
        with self._spans.span(Row.DRIVER, f"commit save {save.step}"):
            timing = save.commit()
        self.step, self.num_applied, self.running = save.step, save.num_updates, None
        log.info("saved step %d: %s", save.step, timing)
        if save.held_up_s and completed < self._job.run_spec.config.train.steps:
            tell = log.info if self._has_told_of_waiting else say
            tell(
                f"the next save was due before that of step {save.step} was written ({timing.write_s:.1f} s): training "
                f"waited {save.held_up_s:.1f} s for it; a larger save_every avoids that"
            )
            self._has_told_of_waiting = True

    @property
    def safe(self) -> str:
        """Return from where a run that fails can go on, for the message."""
        return f"the save of step {self.step} is intact" if self.step >= 0 else "there is no save yet"

    def kept(self, completed: int) -> str:
        """Return what a run that is interrupted after so many steps leaves, for the message."""
        if self.step == completed:
            return f"saved at step {self.step}; the same command resumes"
        if self._job.run_spec.config.save_every is None:
            return "nothing saved (save_every: null)"
        if self.step >= 0:
            return f"all steps since the save of step {self.step} were skipped; the same command resumes from it"
        return "nothing saved; the same command resumes"
