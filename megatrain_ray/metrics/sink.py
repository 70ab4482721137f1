"""Defines what a sink of metrics is, and passes rows and counts to all sinks of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

from megatrain_ray.console.logs import say
from megatrain_ray.run.run_history import History


class End(Enum):
    """Says how a run ended. Names are MLflow's, values are exit codes."""

    FINISHED = 0
    FAILED = 1
    KILLED = 130  # interrupted; the same command resumes


class Count(Enum):
    """Names the counters that are not in rows of metrics."""

    DEATHS = "deaths"
    REPLACEMENTS = "replacements"


class MetricSink:
    """Takes numbers by name: `loss`, `lr`, `exposed_s/h2d`, …

    An exception removes the sink and does not end the run. Only `write` and `close` must be defined.
    """

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of one update or evaluation. Steps come in order."""
        raise NotImplementedError

    def count(self, what: Count, kind: str) -> None:
        """Add 1 to a counter. `kind`: of the process concerned."""

    def keep(self) -> None:
        """Keep recorded values alive: they are still valid. Called continually."""

    def close(self, end: End) -> None:
        """Close the sink: no more numbers come."""
        raise NotImplementedError


class MetricSinks:
    """Passes rows and counts to all sinks of a run. A sink that fails is removed with a warning."""

    def __init__(self, sinks: Mapping[str, MetricSink]) -> None:
        self._sinks = dict(sinks)

    def write(self, row: Mapping[str, Any]) -> None:
        """Pass a row of metrics.jsonl to all sinks."""
        numbers = dict(flat_numbers(row))
        self._call(lambda sink: sink.write(row["step"], numbers))

    def count(self, what: Count, kind: str) -> None:
        self._call(lambda sink: sink.count(what, kind))

    def keep(self) -> None:
        self._call(lambda sink: sink.keep())

    def _call(self, method: Callable[[MetricSink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                method(sink)
            except Exception as error:  # a failing tracker must not end a training
                del self._sinks[name]
                say(f"warning: {name} takes no more metrics ({type(error).__name__}: {error}); metrics.jsonl does")


def flat_numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a row with their names; nested names are joined by a slash."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and name != "step" and math.isfinite(value):
            yield f"{prefix}{name}", float(value)


class DeathRecorder:
    """Records deaths of a run's processes in its history, and counts them in its sinks."""

    def __init__(self, history: History, sinks: MetricSinks, step: Callable[[], int]) -> None:
        """Record into `history` and `sinks`. `step`: returns the number of updates made so far."""
        self._history = history
        self._sinks = sinks
        self._step = step

    def died(self, process: str) -> None:
        self._history.died(process, self._step())
        self._sinks.count(Count.DEATHS, kind_of(process))

    def replaced(self, process: str, took_s: float) -> None:
        self._history.replaced(process, self._step(), took_s)
        self._sinks.count(Count.REPLACEMENTS, kind_of(process))


def kind_of(process: str) -> str:
    """Return the kind of a process, such as `optimizer shard` for `optimizer shard 3`."""
    return process.partition(" of host")[0].rstrip("0123456789 ")
