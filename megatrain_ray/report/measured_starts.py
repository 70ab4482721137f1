"""Compares each start of a run with its plan, from what is in the run directory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from megatrain_ray.accounting.prediction_check import MIN_STEPS, Comparison, compare
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_history import What, read_history


@dataclass(frozen=True)
class MeasuredStart:
    """Holds what a start of a run measured.

    rows: rows of metrics that it wrote and that no later start went back over.
    pss_bytes: host memory of all its processes; None if it was not measured.
    """

    plan_sha256: str
    rows: Sequence[Mapping[str, Any]]
    pss_bytes: int | None


def measured_starts(files: RunFiles) -> list[MeasuredStart]:
    """Return the starts that made enough steps to be compared, oldest first. Raises MegatrainError."""
    starts, last, end = list(_starts(read_history(files.path))), files.rows(), math.inf
    found = []
    for events in reversed(starts):
        step = events[0]["step"]
        rows = [row for row in last if step < row["step"] <= end]
        end = min(end, step)
        if len(rows) > MIN_STEPS:
            memory = [event.get("pss_bytes") for event in events if event["what"] == What.MEMORY.value]
            found.append(MeasuredStart(events[0]["plan_sha256"], rows, memory[-1] if memory else None))
    return found[::-1]


def _starts(history: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the events of each start, the start itself first."""
    begins = [
        k
        for k, event in enumerate(history)
        if event["what"] == What.START.value and {"step", "plan_sha256"} <= event.keys()
    ]
    yield from (list(history[begin:end]) for begin, end in pairwise([*begins, len(history)]))


def compare_start(files: RunFiles, start: MeasuredStart) -> Comparison | None:
    """Compare a start with its plan.

    Return None if the plan is not in the run directory, or has no prediction, or if the rows are those of an earlier
    version, or changed by hand.
    """
    plan = files.read_plan(start.plan_sha256)
    try:
        found = compare(plan, start.rows, start.pss_bytes) if plan else None
        return found and replace(found, plan_sha256=start.plan_sha256)  # a plan of version 1 has another hash now
    except (LookupError, TypeError, ValueError):
        return None


def compare_starts(files: RunFiles) -> list[Comparison]:
    """Return the comparisons of all starts that can be compared, oldest first. Raises MegatrainError."""
    return [found for start in measured_starts(files) if (found := compare_start(files, start)) is not None]
