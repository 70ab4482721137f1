"""Decides what a run does about a process that failed. Supervisor, session and training run carry the decisions out.

Optimizer shards and arena owners keep their state in shared memory, which outlives them, so a replacement continues
where they stopped. A replaced data process draws the same batches. One GPU worker cannot end a step without the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from megatrain_ray.errors import LostProcessError, MegatrainError


class ProcessKind(Enum):
    """Says what a process holds, by which it is decided whether another one can take its place."""

    SHARED_STATE = auto()  # optimizer shard or arena owner
    DATA = auto()
    GPU = auto()
    UNKNOWN = auto()  # one of Ray's own


class RecoveryAction(Enum):
    REPLACE_ACTOR = "another process takes its place"
    REPLACE_GPU_WORKERS = "all GPU workers are replaced, and the steps that have not ended are repeated"
    RESTART = "all processes are started again, from the newest save"
    GIVE_UP = "the run ends"


@dataclass
class FailureBudget:
    """Counts the failures of a start: `count` so far, of at most `limit` (max_failures)."""

    limit: int
    count: int = 0

    def __str__(self) -> str:
        return f"failure {self.count} of at most {self.limit}"


@dataclass(frozen=True)
class Failure:
    """Describes a process that died or whose device failed, and where the run stands."""

    name: str  # of the process, for messages
    kind: ProcessKind
    reason: str  # text of the error by which the failure was noticed
    could_not_start: bool = False  # the process failed before it did anything
    can_step: bool = True  # the engine was built, so there is a state of training to continue from
    repeats_steps: bool = True  # the plan allows a step to be repeated (Plan.repeats_steps)
    lost_hosts: str = ""  # text naming the other hosts whose Ray nodes are gone


# What the decision to end this attempt is raised as. The trainer catches a LostProcessError.
ERRORS = {RecoveryAction.RESTART: LostProcessError, RecoveryAction.GIVE_UP: MegatrainError}


@dataclass(frozen=True)
class Decision:
    action: RecoveryAction
    why: str

    @property
    def error(self) -> MegatrainError | None:
        """Return the error to raise, or None if the attempt goes on."""
        kind = ERRORS.get(self.action)
        return kind(self.why) if kind else None


def decide(failure: Failure, budget: FailureBudget) -> Decision:
    """Return what to do about the failure of a process: the first case that applies. `budget` counts it already."""
    name = failure.name
    is_needed_for_start = failure.kind in (ProcessKind.GPU, ProcessKind.DATA) and not failure.can_step
    if failure.could_not_start or failure.kind is ProcessKind.UNKNOWN or is_needed_for_start:
        died = describe_death(name, failure.reason, could_not_start=failure.could_not_start)
        return Decision(RecoveryAction.GIVE_UP, died)
    if budget.count > budget.limit:
        return Decision(RecoveryAction.GIVE_UP, _over_budget(name, budget))
    if failure.lost_hosts:
        return Decision(RecoveryAction.RESTART, failure.lost_hosts)
    if failure.kind is not ProcessKind.GPU:
        return Decision(RecoveryAction.REPLACE_ACTOR, f"{name}: its state outlives it or can be made again")
    if not failure.repeats_steps:
        why = "the GPU worker died with what lives on the device, or an update under way"
        return Decision(RecoveryAction.RESTART, why)
    return Decision(RecoveryAction.REPLACE_GPU_WORKERS, f"{name}: no GPU worker can end a step without the others")


def decide_restart(reason: str, budget: FailureBudget, newest_save: int | None) -> Decision:
    """Return what to do about a process that could not be replaced. `budget` counts it already.

    reason: text of the LostProcessError.
    newest_save: step of the newest save; None if there is none.
    """
    if budget.count > budget.limit:
        return Decision(RecoveryAction.GIVE_UP, f"{reason}; {_over_budget('a process of the run', budget)}")
    origin = "nothing is saved: beginning again"
    if newest_save is not None:
        origin = f"going on from the save of step {newest_save}"
    return Decision(RecoveryAction.RESTART, f"{reason}; {origin} ({budget})")


def describe_death(name: str, reason: str, *, could_not_start: bool) -> str:
    """Return the message for a process whose death ends the run."""
    if could_not_start:  # then `reason` ends with the error that it raised
        return f"a process of the run ({name}) could not start: {reason.strip().splitlines()[-1]}"
    return f"a process of the run died ({name}); the same command resumes"


def _over_budget(name: str, budget: FailureBudget) -> str:
    return (
        f"{name} died, the run's failure number {budget.count} (max_failures: {budget.limit}); the same command resumes"
    )
