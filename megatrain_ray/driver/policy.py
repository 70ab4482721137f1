"""Decides what a run does next, one tick at a time, from what has happened. It does nothing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.planning.stop_deadline import STEPS_AHEAD
from megatrain_ray.run.best_evaluation import num_without_better


class Action(Enum):
    STEP = "start the next step"
    EVALUATE = "begin an evaluation of the last step; none is under way, and no step"
    SAMPLE = "begin to sample rollouts after the last step; no step is under way"
    SAVE = "begin a save of the last step; none is under way"
    WAIT = "wait for a step, an evaluation or the save to end, or for data"
    STOP = "the run is over"


@dataclass(frozen=True)
class Observation:
    """Describes where a run stands. Numbers of updates are those of the whole run."""

    submitted: int
    completed: int
    saved: int  # updates in the newest save; -1: there is none
    interrupted: bool
    changed: bool = True  # a step since the newest save was not skipped
    saving: bool = False  # a save is being written
    missed: bool = False  # the last save that was begun was abandoned, or a callback wants one
    evaluated: int = -1  # the last update after which the held-out data were evaluated; 0: before the first; -1: never
    evaluating: bool = False
    sampled: int = -1  # the last update after which rollouts were sampled, as `evaluated`
    sampling: bool = False
    wants_evaluation: bool = False  # a callback wants one more
    held_back: bool = False  # the data of the next step are not there yet
    num_without_better: int = 0  # evaluations in a row that were no better than an earlier one


@dataclass(frozen=True)
class RunPolicy:
    """Decides when to step, save and evaluate."""

    steps: int
    save_every: int | None  # None: never; 0: at the end and when interrupted; N: after every N updates as well
    eval_every: int = 0  # 0: never; N: before the first update, after every N, and after the last
    saves_evaluated: bool = False  # save every step that is evaluated
    eval_patience: int | None = None  # evaluations without a better one that end the run; None: they never do
    sample_every: int = 0  # updates from one sampling of rollouts to the next; 0: none are sampled

    @staticmethod
    def of(config: TrainConfig) -> RunPolicy:
        return RunPolicy(
            config.train.num_steps, config.save_steps, config.eval_steps, config.save_best, config.eval_patience,
            config.train.sampling_interval,
        )  # fmt: skip

    def tick(self, seen: Observation) -> Action:
        under_way = seen.submitted - seen.completed
        if seen.evaluating or seen.sampling:
            return Action.WAIT
        if due := self._due_between_steps(seen):
            return Action.WAIT if under_way else due
        if seen.submitted >= self.steps or seen.interrupted or self._has_lost_patience(seen):
            if under_way or seen.saving:
                return Action.WAIT
            has_unsaved = max(0, seen.saved) < seen.completed and seen.changed  # other weights than the newest save's
            return Action.SAVE if self.save_every is not None and has_unsaved else Action.STOP
        if under_way >= STEPS_AHEAD or seen.held_back or (seen.saving and self.saves_next(seen)):
            return Action.WAIT
        return Action.STEP

    def _due_between_steps(self, seen: Observation) -> Action | None:
        """Return what is to be done after the last submitted step and before the next one; None: nothing."""
        if seen.interrupted:
            return None
        if self._owes_evaluation(seen):
            return Action.EVALUATE
        ends = seen.submitted >= self.steps or self._has_lost_patience(seen)
        if ends or not self.sample_every or seen.sampled >= seen.submitted // self.sample_every * self.sample_every:
            return None
        return Action.SAMPLE

    def saves_next(self, seen: Observation) -> bool:
        """Return whether the state after the next step is to be saved while training goes on."""
        step = seen.submitted + 1
        if self.save_every is None:
            return False
        return seen.missed or step == self.steps or any(step % every == 0 for every in self.save_intervals)

    @property
    def save_intervals(self) -> tuple[int, ...]:
        """Return the numbers of updates after whose multiples the state is saved."""
        return tuple(filter(None, (self.save_every, self.eval_every if self.saves_evaluated else 0)))

    def is_done_after(self, step: int, evaluations: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether a run that is not under way is done after `step` updates.

        evaluations: rows of the run's evaluations. If the last one is missing, the run was killed during that, or
            eval_every is new.
        """
        made = [row for row in evaluations if row["step"] <= step]
        evaluated = max((row["step"] for row in made), default=-1)
        seen = Observation(step, step, step, interrupted=False, evaluated=evaluated)
        return self.is_done(replace(seen, num_without_better=num_without_better(made)))

    def is_done(self, seen: Observation) -> bool:
        """Return whether nothing but a save is left to do."""
        is_over = seen.completed >= self.steps or self._has_lost_patience(seen)
        return is_over and not self._owes_evaluation(seen)

    def _has_lost_patience(self, seen: Observation) -> bool:
        return self.eval_patience is not None and seen.num_without_better >= self.eval_patience

    def _owes_evaluation(self, seen: Observation) -> bool:
        """Return whether an evaluation after the last submitted step is due and not made, even if interrupted."""
        step = seen.submitted
        if not self.eval_every or step > self.steps or seen.evaluated >= step:
            return False
        return seen.wants_evaluation or step % self.eval_every == 0 or step == self.steps
