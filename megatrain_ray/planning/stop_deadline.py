"""How long a stopped run needs until its last save is whole, and what `ray job stop` gives it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatrain_ray.engine.plan.plan import Plan

# The GPU worker gets the next step before it has answered the last: a round trip through Ray takes longer than the
# time between two small steps.
STEPS_AHEAD = 2

# Read by Ray's job supervisor, whose environment is the head's with the job's env_vars, and which the driver inherits.
VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
RAY_DEFAULT_S = 3.0

END_S = 10.0  # a guess: actors that end, and Python
SLOWER = 1.5  # a guess: a disk that others use too
ROUND_S = 10


def stop_wait_s(plan: Plan, save_every: int | None, disk_bytes_per_s: float, step_s: float) -> int:
    """Seconds from SIGTERM to the end of the process, on the safe side, in whole tens: the steps that are under way,
    the save that may be, and the last one. 0 where nothing is saved."""
    if save_every is None:
        return 0
    num_saves = 2 if save_every else 1
    seconds = STEPS_AHEAD * step_s + num_saves * plan.save_bytes / disk_bytes_per_s + END_S
    return ROUND_S * math.ceil(SLOWER * seconds / ROUND_S)


def given_s(environment: Mapping[str, str]) -> float:
    """Between SIGTERM and SIGKILL of a job, by its environment."""
    try:
        return int(environment[VARIABLE])
    except (KeyError, ValueError):  # of what is no number Ray makes an error at the stop
        return RAY_DEFAULT_S


def warning_of(needed_s: int, environment: Mapping[str, str]) -> str | None:
    """What a run in a job has to say at its start; None where the time is enough."""
    given = given_s(environment)
    if given >= needed_s:
        return None
    return (
        f"warning: `ray job stop` kills this run {given:.0f} s after it asks it to save, which takes up to {needed_s} "
        f"s: set {VARIABLE}={needed_s} in the env_vars of the job's runtime environment; a save that is cut short is "
        "lost, and the one before it stays whole"
    )
