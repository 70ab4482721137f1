"""Where the seconds of a step went, in a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SMALLEST_SHARE = 0.005  # of a step's seconds that is told


def describe_split(rows: Sequence[Mapping[str, Any]]) -> str:
    """Seconds a step of these rows of metrics: the whole, then compute, then what the compute stage waited for, by
    cause and the longest first."""
    step_s = sum(row["step_s"] for row in rows) / len(rows)
    exposed_s = {cause: sum(row["exposed_s"][cause] for row in rows) / len(rows) for cause in rows[0]["exposed_s"]}
    longest = sorted(exposed_s.items(), key=lambda item: -item[1])
    parts = [("compute", max(0.0, step_s - sum(exposed_s.values())))]
    parts += [(cause, waited_s) for cause, waited_s in longest if waited_s >= SMALLEST_SHARE * step_s]
    return f"{step_s:.3g} s: {', '.join(f'{name} {seconds:.3g}' for name, seconds in parts)}"
