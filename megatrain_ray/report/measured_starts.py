"""Compares each start of a run with its plan, from what is in the run directory, and formats the comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from megatrain_ray.accounting.prediction_check import MIN_STEPS, Comparison, Term, TermKind, compare
from megatrain_ray.console.progress import SMALLEST_SHARE
from megatrain_ray.report.sound_rows import sound
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_history import What, read_history
from megatrain_ray.units import format_bytes

LABELS = {
    "updates": "shards at work",
    "disk": "disk at work",
    "HBM": "tensors in HBM",
    "host": "host memory",
    "disk traffic": "disk, a step",
    "weights read": "of it weights",
    "activation traffic": "of it activations",
}


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
    starts, last, end = list(_starts(read_history(files.path))), sound(files.rows()), math.inf
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
    is_start = [row["what"] == What.START.value and {"step", "plan_sha256"} <= row.keys() for row in history]
    begins = [k for k, found in enumerate(is_start) if found]
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


def comparison_table(found: Comparison) -> Iterator[str]:
    """Yield the lines of a comparison as `megatrain inspect` prints them."""
    yield f"steps {found.first_step} to {found.last_step}, by the plan {found.plan_sha256[:12]}"
    yield f"{'':18} {'predicted':>11} {'measured':>11}"
    for term in compared_terms(found):
        yield f"{term.label:18} {term.predicted:>11} {term.measured:>11}  {term.error}".rstrip()


class ComparedTerm(NamedTuple):
    """Holds a term of a comparison as text; `error` is that of the prediction, and empty for waits."""

    label: str
    predicted: str
    measured: str
    error: str


def compared_terms(found: Comparison) -> list[ComparedTerm]:
    """Return as text the terms that are worth a line: all but waits that are short both as predicted and measured."""
    shortest_s = SMALLEST_SHARE * found.step.measured
    return [
        _as_text(term)
        for term in found.terms
        if term.kind is not TermKind.PART or max(term.predicted, term.measured) >= shortest_s
    ]


def _as_text(term: Term) -> ComparedTerm:
    is_wait = term.kind is TermKind.PART and term.name != "compute"
    label = f"wait {term.name.replace('_', ' ')}" if is_wait else LABELS.get(term.name, term.name)
    predicted, measured = (
        format_bytes(int(value)) if term.is_of_bytes else f"{value:.3g} s" for value in (term.predicted, term.measured)
    )
    # A wait has no error: a share of almost nothing means nothing.
    return ComparedTerm(label, predicted, measured, "" if is_wait else term.error_text)
