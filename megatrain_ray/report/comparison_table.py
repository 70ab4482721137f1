"""Formats a Comparison as `megatrain inspect` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatrain_ray.accounting.prediction_check import Comparison, Term, TermKind
from megatrain_ray.console.step_split import SMALLEST_SHARE
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


def comparison_table(found: Comparison) -> Iterator[str]:
    yield f"steps {found.first_step} to {found.last_step}, by the plan {found.plan_sha256[:12]}"
    yield f"{'':18} {'predicted':>11} {'measured':>11}"
    for term in compared_terms(found):
        yield f"{term.label:18} {term.predicted:>11} {term.measured:>11}  {term.error}".rstrip()


class ComparedTerm(NamedTuple):
    """Holds a term of a comparison as text.

    error: error of the prediction; empty for waits.
    """

    label: str
    predicted: str
    measured: str
    error: str


def compared_terms(found: Comparison) -> list[ComparedTerm]:
    """Return the terms that are worth a line, as text."""
    return [
        ComparedTerm(_label(term), _number(term, term.predicted), _number(term, term.measured), _error(term))
        for term in found.terms
        if _is_told(term, found.step.measured)
    ]


def _is_told(term: Term, step_s: float) -> bool:
    """Return whether a term is worth a line: any but a wait that is short both in prediction and measurement."""
    return term.kind is not TermKind.PART or max(term.predicted, term.measured) >= SMALLEST_SHARE * step_s


def _label(term: Term) -> str:
    is_wait = term.kind is TermKind.PART and term.name != "compute"
    return f"wait {term.name.replace('_', ' ')}" if is_wait else LABELS.get(term.name, term.name)


def _number(term: Term, value: float) -> str:
    return format_bytes(int(value)) if term.is_of_bytes else f"{value:.3g} s"


def _error(term: Term) -> str:
    """Return the relative error as text; empty for a wait, where a share of almost nothing means nothing."""
    return "" if term.kind is TermKind.PART and term.name != "compute" else f"{term.error:+.0%}"
