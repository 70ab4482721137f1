"""Describes in one line where the seconds of a step went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SMALLEST_SHARE = 0.005  # smallest share of a step that is listed


def describe_split(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean seconds of a step as one line: total, compute, then the compute stage's waits by cause.

    Waits are listed longest first; those below `SMALLEST_SHARE` of a step are left out.

    rows: rows of metrics.
    """
    step_s = sum(row["step_s"] for row in rows) / len(rows)
    exposed_s = {cause: sum(row["exposed_s"][cause] for row in rows) / len(rows) for cause in rows[0]["exposed_s"]}
    longest = sorted(exposed_s.items(), key=lambda item: -item[1])
    parts = [("compute", max(0.0, step_s - sum(exposed_s.values())))]
    parts += [(cause, waited_s) for cause, waited_s in longest if waited_s >= SMALLEST_SHARE * step_s]
    return f"{step_s:.3g} s: {', '.join(f'{name} {seconds:.3g}' for name, seconds in parts)}"
