"""The run's policy: what to do next, decided one tick at a time from what has happened. Does nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# The GPU worker gets the next step before it has answered the last: a round trip through Ray takes longer than the
# time between two small steps.
STEPS_AHEAD = 2


class Action(Enum):
    STEP = "start the next step"
    SAVE = "save; no step is under way"
    WAIT = "wait for a step to end"
    STOP = "the run is over"


@dataclass(frozen=True)
class Observation:
    """`submitted` and `completed` count updates of the whole run, `saved` is the newest save (-1: none)."""

    submitted: int
    completed: int
    saved: int
    interrupted: bool


@dataclass(frozen=True)
class RunPolicy:
    """`save_every`: None never, 0 at the end and when interrupted, N after every N updates as well."""

    steps: int
    save_every: int | None

    def tick(self, seen: Observation) -> Action:
        under_way = seen.submitted - seen.completed
        last = seen.submitted >= self.steps or seen.interrupted
        if self._save_due(seen, last=last):
            return Action.WAIT if under_way else Action.SAVE
        if last:
            return Action.WAIT if under_way else Action.STOP
        return Action.STEP if under_way < STEPS_AHEAD else Action.WAIT

    def _save_due(self, seen: Observation, *, last: bool) -> bool:
        """Whether the next thing after the steps under way is a save."""
        if self.save_every is None or seen.saved >= seen.submitted or seen.submitted == 0:
            return False
        return last or (self.save_every > 0 and seen.submitted % self.save_every == 0)
