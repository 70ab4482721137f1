"""Finds the least held-out loss of a run in its evaluations, and whether the run ended early because of it.

Everything is read from evaluations.jsonl, so a kill or a resume changes nothing. The evaluation before the first update
does not count: no save holds its weights. Nor do those of other held-out data, which a resume may have replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def best_evaluation(rows: Sequence[Row], steps: Collection[int] | None = None) -> Row | None:
    """Return the evaluation with the least loss, the earliest of equals; None if there is none with a finite loss.

    rows: of evaluations.jsonl.
    steps: only evaluations after these steps count; None: all.
    """
    finite = [
        row
        for row in counted(rows)
        if isinstance(row.get("eval_loss"), (int, float)) and (steps is None or row["step"] in steps)
    ]
    return min(finite, key=lambda row: row["eval_loss"], default=None)


def num_without_better(rows: Sequence[Row]) -> int:
    """Return how many evaluations in a row, up to the newest, were no better than an earlier one."""
    best, evaluations = best_evaluation(rows), counted(rows)
    return len(evaluations) if best is None else sum(row["step"] > best["step"] for row in evaluations)


def counted(rows: Sequence[Row]) -> list[Row]:
    """Return the evaluations of weights that a save may hold, on the held-out data of the newest one.

    Other data are known by another number of tokens.
    """
    of_saves = [row for row in rows if row["step"] >= 1]
    return [row for row in of_saves if row.get("eval_tokens") == of_saves[-1].get("eval_tokens")]


def why_ended_early(rows: Sequence[Row], patience: int | None) -> str | None:
    """Return why a run with these evaluations has ended early; None if it has not. `patience`: eval_patience."""
    if patience is None or num_without_better(rows) < patience:
        return None
    best = best_evaluation(rows)
    than = "finite" if best is None else f"better than {best['eval_loss']:.4f} after step {best['step']}"
    return (
        f"ended early after step {rows[-1]['step']}: no eval_loss of the last {num_without_better(rows)} evaluations "
        f"was {than} (eval_patience: {patience})"
    )
