"""Records deaths of a run's processes in its history and its metric sinks."""

from __future__ import annotations

from collections.abc import Callable

from megatrain_ray.metrics.sink import Count
from megatrain_ray.metrics.sinks import MetricSinks
from megatrain_ray.run.run_history import History


class DeathRecorder:
    """Records deaths in the run's history and counts them in its metric sinks."""

    def __init__(self, history: History, sinks: MetricSinks, step: Callable[[], int]) -> None:
        """Record into `history` and `sinks`.

        step: returns the number of updates made so far.
        """
        self._history = history
        self._sinks = sinks
        self._step = step

    def died(self, process: str) -> None:
        self._history.died(process, self._step())
        self._sinks.count(Count.DEATHS, 1, kind_of(process))

    def replaced(self, process: str, took_s: float) -> None:
        self._history.replaced(process, self._step(), took_s)
        self._sinks.count(Count.REPLACEMENTS, 1, kind_of(process))


def kind_of(process: str) -> str:
    """Return the kind of a process, such as `optimizer shard` for `optimizer shard 3`.

    The number of kinds does not depend on the number of shards.
    """
    return process.partition(" of host")[0].rstrip("0123456789 ")
