"""Computes how long a stopped run needs until its last save is complete, and how long `ray job stop` lets it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatrain_ray.engine.plan.plan import Plan

# The GPU worker receives the next step before it has answered the last: a round trip through Ray takes longer than the
# time between two small steps.
STEPS_AHEAD = 2

# Ray's job supervisor reads it. Its environment is the head's with the job's env_vars, and the driver inherits it.
VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
RAY_DEFAULT_S = 3.0

END_S = 10.0  # a guess: the time to end actors and Python
SLOWER = 1.5  # a guess: the factor for a disk that others use too
ROUND_S = 10


def stop_wait_s(plan: Plan, save_interval: float | None, disk_bytes_per_s: float, step_s: float) -> int:
    """Return the seconds from SIGTERM to the end of the process, rounded up to tens; 0 if nothing is saved.

    They cover the steps in flight, a save that may be in flight (with `save_interval` > 0), and the last save, and
    include a margin.
    """
    if save_interval is None:
        return 0
    num_saves = 2 if save_interval else 1
    seconds = STEPS_AHEAD * step_s + num_saves * plan.save_bytes / disk_bytes_per_s + END_S
    return ROUND_S * math.ceil(SLOWER * seconds / ROUND_S)


def warning_of(needed_s: int, environment: Mapping[str, str]) -> str | None:
    """Return the warning that a run in a job has to print at its start; None if the time is sufficient.

    needed_s: seconds that the run needs, from `stop_wait_s`.
    """
    try:
        given = float(int(environment[VARIABLE]))  # seconds between SIGTERM and SIGKILL
    except (KeyError, ValueError):  # Ray raises an error at the stop if the value is no number
        given = RAY_DEFAULT_S
    if given >= needed_s:
        return None
    return (
        f"warning: `ray job stop` kills this run {given:.0f} s after it asks it to save, which takes up to {needed_s} "
        f"s: set {VARIABLE}={needed_s} in the env_vars of the job's runtime environment; a save that is cut short is "
        "lost, and the one before it stays whole"
    )
