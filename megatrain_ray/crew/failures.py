"""Deaths of a run's processes: how many a start makes good, and who keeps account of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatrain_ray.errors import MegatrainError
from megatrain_ray.metrics.sink import Count
from megatrain_ray.metrics.sinks import MetricSinks
from megatrain_ray.run.run_history import History


class FaultWatch(Protocol):
    """Hears of each death once."""

    def died(self, process: str) -> None:
        """`process`: by its name in the crew."""

    def replaced(self, process: str, took_s: float) -> None:
        """Another one has its place, `took_s` seconds later."""


class Unwatched:
    """Nobody keeps account."""

    def died(self, process: str) -> None:
        pass

    def replaced(self, process: str, took_s: float) -> None:
        pass


class Faults:
    """Into the run's history and its sinks."""

    def __init__(self, history: History, sinks: MetricSinks, step: Callable[[], int]) -> None:
        """`step`: how many updates were made by now."""
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
    """`optimizer shard` of `optimizer shard 3`: as many kinds as there are, whatever the number of shards."""
    return process.partition(" of host")[0].rstrip("0123456789 ")


@dataclass
class FailureBudget:
    """`count` of at most `limit` so far."""

    limit: int
    count: int = 0

    def spend(self, name: str, reason: str = "") -> None:
        """`name` has died. Raises MegatrainError where that was one too many, which begins with `reason`."""
        self.count += 1
        if self.count > self.limit:
            raise MegatrainError(
                f"{reason}{name} died, the run's failure number {self.count} (max_failures: {self.limit}); the same "
                "command resumes"
            )

    def __str__(self) -> str:
        return f"failure {self.count} of at most {self.limit}"
