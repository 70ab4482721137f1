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


def before_training(rows: Sequence[Row]) -> Row | None:
    """Return the evaluation before the first update, if it is of the held-out data of the newest one, and finite."""
    first = next((row for row in rows if row["step"] == 0 and isinstance(row.get("eval_loss"), (int, float))), None)
    return first if first and first.get("eval_tokens") == rows[-1].get("eval_tokens") else None


def is_no_better(rows: Sequence[Row]) -> bool:
    """Return whether every evaluation after the first update has at least the loss of the one before it."""
    before, best = before_training(rows), best_evaluation(rows)
    return before is not None and bool(counted(rows)) and (best is None or best["eval_loss"] >= before["eval_loss"])


def describe_harm(rows: Sequence[Row]) -> str | None:
    """Return in words that training raised the held-out loss, or never lowered it; None if it did neither."""
    before = before_training(rows)
    if before is None or not counted(rows):
        return None
    first, last = before["eval_loss"], rows[-1].get("eval_loss")
    if all(row.get("eval_loss") == first for row in counted(rows)):  # rewards of 0, say
        return None
    said = [] if last is None or last <= first else [f"held-out loss rose from {first:.4f} to {last:.4f}"]
    if is_no_better(rows):
        said.append("no evaluated save is better than the model before training")
    return "; ".join(said) or None


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
