"""The run's policy: what to do next, decided one tick at a time from what has happened. Does nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# The GPU worker gets the next step before it has answered the last: a round trip through Ray takes longer than the
# time between two small steps.
STEPS_AHEAD = 2


class Action(Enum):
    STEP = "start the next step"
    SAVE = "begin a save of the last step; none is under way"
    WAIT = "wait for a step or the save to end"
    STOP = "the run is over"


@dataclass(frozen=True)
class Observation:
    """`submitted` and `completed` count updates of the whole run, `saved` is the newest save (-1: none).

    `saving`: one is being written. `missed`: the last one that was begun did not come about.
    """

    submitted: int
    completed: int
    saved: int
    interrupted: bool
    saving: bool = False
    missed: bool = False


@dataclass(frozen=True)
class RunPolicy:
    """`save_every`: None never, 0 at the end and when interrupted, N after every N updates as well."""

    steps: int
    save_every: int | None

    def tick(self, seen: Observation) -> Action:
        under_way = seen.submitted - seen.completed
        if seen.submitted >= self.steps or seen.interrupted:
            if under_way or seen.saving:
                return Action.WAIT
            return Action.SAVE if self._unsaved(seen) else Action.STOP
        if under_way >= STEPS_AHEAD or (seen.saving and self.saves_next(seen)):
            return Action.WAIT
        return Action.STEP

    def saves_next(self, seen: Observation) -> bool:
        """Whether the next step is one whose state is saved, while training goes on."""
        step = seen.submitted + 1
        if self.save_every is None:
            return False
        return seen.missed or step == self.steps or (self.save_every > 0 and step % self.save_every == 0)

    def _unsaved(self, seen: Observation) -> bool:
        return self.save_every is not None and max(0, seen.saved) < seen.completed
