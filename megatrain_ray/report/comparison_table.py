"""Formats a Comparison as `megatrain inspect` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatrain_ray.accounting.prediction_check import Comparison, Term, TermKind
from megatrain_ray.console.progress import SMALLEST_SHARE
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
    """Return as text the terms that are worth a line: all but waits that are short both as predicted and measured."""
    shortest_s = SMALLEST_SHARE * found.step.measured
    told = (
        term
        for term in found.terms
        if term.kind is not TermKind.PART or max(term.predicted, term.measured) >= shortest_s
    )
    return [_as_text(term) for term in told]


def _as_text(term: Term) -> ComparedTerm:
    is_wait = term.kind is TermKind.PART and term.name != "compute"
    label = f"wait {term.name.replace('_', ' ')}" if is_wait else LABELS.get(term.name, term.name)
    predicted, measured = (
        format_bytes(int(value)) if term.is_of_bytes else f"{value:.3g} s" for value in (term.predicted, term.measured)
    )
    # A wait has no error: a share of almost nothing means nothing.
    return ComparedTerm(label, predicted, measured, "" if is_wait else f"{term.error:+.0%}")
