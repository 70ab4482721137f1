"""Holds the pending calls that ask the processes of a run what they have done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from megatrain_ray.accounting.work_counters import RunWork


class WorkCalls(NamedTuple):
    """Holds Ray calls to the first host's shards, which return ShardWork, and its GPU workers, which return GpuWork."""

    shards: Sequence[Any]
    gpus: Sequence[Any]

    @property
    def all(self) -> list[Any]:
        return [*self.shards, *self.gpus]

    def done(self, timeout_s: float) -> RunWork:
        """Return the results, and wait for them at most `timeout_s` seconds.

        Raises what a call raised, and GetTimeoutError.
        """
        answers = ray.get(self.all, timeout=timeout_s)
        return RunWork(answers[: len(self.shards)], answers[len(self.shards) :])
