"""Records deaths of a run's processes, and limits how many a start replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatrain_ray.errors import MegatrainError
from megatrain_ray.metrics.sink import Count
from megatrain_ray.metrics.sinks import MetricSinks
from megatrain_ray.run.run_history import History


class FaultWatch(Protocol):
    """Receives one notice of each death of a process, and one of its replacement."""

    def died(self, process: str) -> None:
        """Record that a process died.

        process: its name in the crew.
        """

    def replaced(self, process: str, took_s: float) -> None:
        """Record that another process took its place, `took_s` seconds after the death was noticed."""


class Unwatched:
    """Ignores all deaths."""

    def died(self, process: str) -> None:
        pass

    def replaced(self, process: str, took_s: float) -> None:
        pass


class Faults:
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


@dataclass
class FailureBudget:
    """Counts the failures of a start: `count` so far, of at most `limit` (max_failures)."""

    limit: int
    count: int = 0

    def spend(self, name: str, reason: str = "") -> None:
        """Count the death of the process `name`.

        Raises MegatrainError if that was one failure too many. Its message begins with `reason`.
        """
        self.count += 1
        if self.count > self.limit:
            raise MegatrainError(
                f"{reason}{name} died, the run's failure number {self.count} (max_failures: {self.limit}); the same "
                "command resumes"
            )

    def __str__(self) -> str:
        return f"failure {self.count} of at most {self.limit}"
