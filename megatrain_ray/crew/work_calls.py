"""What the processes of a run were asked for of their work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from megatrain_ray.accounting.work_counters import RunWork


class WorkCalls(NamedTuple):
    """Calls of Ray: of the first host's shards, answered by ShardWork, and GPU workers, by GpuWork."""

    shards: Sequence[Any]
    gpus: Sequence[Any]

    @property
    def all(self) -> list[Any]:
        return [*self.shards, *self.gpus]

    def done(self, timeout_s: float) -> RunWork:
        """Raises what a call raised, GetTimeoutError."""
        answers = ray.get(self.all, timeout=timeout_s)
        return RunWork(answers[: len(self.shards)], answers[len(self.shards) :])
