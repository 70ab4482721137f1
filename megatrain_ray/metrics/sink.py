"""What takes a run's metrics: rows of metrics.jsonl as they come, and, where it wants them, counts beside these."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol, runtime_checkable

from megatrain_ray.engine.layout.tier import Tier


class End(Enum):
    """How a run came to its end, in the words of MLflow, and as an exit code."""

    FINISHED = 0
    FAILED = 1
    KILLED = 130  # interrupted; the same command goes on


class MetricSink(Protocol):
    """Takes numbers by name: `loss`, `lr`, `exposed_s/h2d`, …"""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Of one update; steps come in order. Whatever it raises costs the sink, not the run."""

    def close(self, end: End) -> None:
        """Nothing more comes."""


class Count(Enum):
    """What is counted beside rows. Its value: the name of the counter."""

    DEATHS = "deaths"
    REPLACEMENTS = "replacements"
    DISK_READ = "disk_read_bytes"
    DISK_WRITTEN = "disk_written_bytes"


@runtime_checkable
class CountingSink(Protocol):
    """Takes what comes between rows, too."""

    def count(self, what: Count, amount: float, kind: str) -> None:
        """`kind`: of the processes concerned."""

    def holds(self, tier: Tier, num_bytes: float) -> None:
        """So much is there."""

    def keep(self) -> None:
        """What was told still holds. Called all the time."""
