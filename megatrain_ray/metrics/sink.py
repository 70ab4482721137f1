"""Defines what a sink of metrics is.

A sink takes rows of metrics.jsonl as they are written. It may also take counts between rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class End(Enum):
    """Says how a run ended. Names are MLflow's, values are exit codes."""

    FINISHED = 0
    FAILED = 1
    KILLED = 130  # interrupted; the same command resumes


class Count(Enum):
    """Names the counters that are not in rows of metrics. The values are the names of the exported counters."""

    DEATHS = "deaths"
    REPLACEMENTS = "replacements"


class MetricSink:
    """Takes numbers by name: `loss`, `lr`, `exposed_s/h2d`, …

    An exception removes the sink and does not end the run. Only `write` and `close` must be defined.
    """

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of one update or evaluation. Steps come in order."""
        raise NotImplementedError

    def count(self, what: Count, amount: float, kind: str) -> None:
        """Add `amount` to a counter.

        kind: kind of the processes concerned.
        """

    def keep(self) -> None:
        """Keep recorded values alive: they are still valid. Called continually."""

    def close(self, end: End) -> None:
        """Close the sink: no more numbers come."""
        raise NotImplementedError
