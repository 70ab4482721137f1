"""Counts what the first host's processes read from the spill disk and write to it, as they report from time to time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import ray

from megatrain_ray.accounting.work_counters import RunWork
from megatrain_ray.crew.actor_role import ANSWER_S
from megatrain_ray.crew.work_calls import WorkCalls
from megatrain_ray.crew.worker_group import Crew
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.io.storage.measured_store import NOTHING, Moved
from megatrain_ray.metrics.deaths import kind_of
from megatrain_ray.metrics.sink import Count
from megatrain_ray.metrics.sinks import MetricSinks
from megatrain_ray.run.run_processes import gpu_name, shard_name

log = logging.getLogger(__name__)

EVERY_S = 5.0  # seconds, as often as anybody scrapes metrics; an answer takes a Ray call to each process


class DiskCounts:
    """Counts disk traffic into the sinks of a run.

    Nothing waits for an answer: it is taken at the end of the first step after it came.
    """

    def __init__(self, plan: Plan, sinks: MetricSinks, clock: Callable[[], float] = time.monotonic) -> None:
        self._uses_disk = plan.total_bytes(Tier.NVME) > 0
        self._sinks = sinks
        self._clock = clock
        self._asked_s = -EVERY_S
        self._calls: WorkCalls | None = None
        self._before: dict[tuple[str, int], Moved] = {}  # by name and pid, since a replacement counts from 0

    def ended(self, crew: Crew) -> None:
        """Take answers that have come, and ask again every EVERY_S seconds. Call it after every step."""
        if not self._uses_disk:
            return
        if self._calls and len(ray.wait(self._calls.all, num_returns=len(self._calls.all), timeout=0)[1]) == 0:
            calls, self._calls = self._calls, None
            self._take(calls)
        if self._calls is None and self._clock() - self._asked_s >= EVERY_S:
            self._asked_s, self._calls = self._clock(), crew.work()

    def _take(self, calls: WorkCalls) -> None:
        try:
            work = calls.done(ANSWER_S)
        except ray.exceptions.RayError as error:  # the crew replaces who died, or ends the run
            log.info("what was moved on the disk is not counted this time: %s", error)
            return
        self.add(work)

    def add(self, work: RunWork) -> None:
        """Count what the processes have moved since the previous call."""
        for k, shard in enumerate(work.shards):
            self._count(shard_name(k), shard.pid, shard.moved)
        for rank, gpu in enumerate(work.gpus):
            self._count(gpu_name(rank), gpu.pid, gpu.weights.plus(gpu.activations))
        of_gpus = sum(gpu.spill_bytes for gpu in work.gpus)
        self._sinks.holds(Tier.NVME, of_gpus + sum(shard.spill_bytes for shard in work.shards))

    def _count(self, process: str, pid: int, moved: Moved) -> None:
        more = moved.since(self._before.get((process, pid), NOTHING))
        self._before[process, pid] = moved
        self._sinks.count(Count.DISK_READ, more.read, kind_of(process))
        self._sinks.count(Count.DISK_WRITTEN, more.written, kind_of(process))
