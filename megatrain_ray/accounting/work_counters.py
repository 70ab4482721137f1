"""Computes the work of one step from what the processes of a run's first host had done at two moments. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatrain_ray.accounting.gpu_work import GpuWork
from megatrain_ray.accounting.shard_work import ShardWork
from megatrain_ray.io.storage.measured_store import Busy, Time


@dataclass(frozen=True)
class RunWork:
    """Holds what the processes of a run's first host have done so far."""

    shards: Sequence[ShardWork]
    gpus: Sequence[GpuWork]


@dataclass(frozen=True)
class StepWork:
    """Describes the work of one step, of all processes together unless stated otherwise.

    update_s: seconds of updates of the shard that took longest.
    disk_bytes: bytes read from disk and written to it, by all processes.
    disk_s: seconds in which at least one transfer to or from disk was under way, in any process.
    spill_bytes: bytes that all files take on the disk.
    weight_bytes, activation_bytes: the part of `disk_bytes` that GPU workers moved, by kind.
    """

    update_s: float
    disk_bytes: float = 0.0
    disk_s: float = 0.0
    spill_bytes: int = 0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0


def work_between(before: RunWork | None, after: RunWork | None) -> StepWork | None:
    """Return the mean work of one step between two moments.

    Return None if a process did not answer or was replaced, or if no step and no update lies between the moments.
    """
    if before is None or after is None:
        return None
    pairs = list(zip(before.shards, after.shards, strict=False))
    of_gpus = [(a, b, b.num_steps - a.num_steps) for a, b in zip(before.gpus, after.gpus, strict=False)]
    same = _pids(before) == _pids(after)
    # If all layers live on the device, shards make no update at all, and `update` stays 0.
    if not same or any(count <= 0 for *_, count in of_gpus) or any(a.update >= b.update > 0 for a, b in pairs):
        return None
    steps = [(a, b, max(1, b.update - a.update)) for a, b in pairs]
    weights = sum(b.weights.since(a.weights).total / count for a, b, count in of_gpus)
    activations = sum(b.activations.since(a.activations).total / count for a, b, count in of_gpus)
    of_shards = sum(b.moved.since(a.moved).total / count for a, b, count in steps)
    return StepWork(
        update_s=max(((b.update_s - a.update_s) / count for a, b, count in steps), default=0.0),
        disk_bytes=of_shards + weights + activations,
        disk_s=_disk_s(after, of_gpus[0][2]),
        spill_bytes=sum(gpu.spill_bytes for gpu in after.gpus) + sum(work.spill_bytes for work in after.shards),
        weight_bytes=weights,
        activation_bytes=activations,
    )


def _pids(work: RunWork) -> list[int]:
    return [*(gpu.pid for gpu in work.gpus), *(shard.pid for shard in work.shards)]


def _disk_s(work: RunWork, num_steps: int) -> float:
    """Return the mean seconds of a step in which at least one process used the disk.

    The steps are the newest `num_steps` of the first GPU. Times before `since_s` of any process are left out: that
    process no longer has a complete list of its transfers from then.
    """
    every = [*(shard.busy for shard in work.shards), *(busy for gpu in work.gpus for busy in gpu.busy)]
    since_s = max(busy.since_s for busy in every)
    steps = work.gpus[0].steps[-num_steps:]
    known = [Time(max(step.start_s, since_s), step.end_s) for step in steps if step.end_s > since_s]
    known_s = _total_s(known)
    if not known_s:
        return 0.0
    return _shared_s(_union(every), known) / known_s * statistics.mean(step.end_s - step.start_s for step in steps)


def _union(every: Iterable[Busy]) -> list[Time]:
    """Return the intervals in which at least one process was busy, disjoint and in order."""
    merged: list[Time] = []
    for start_s, end_s in sorted(time for busy in every for time in busy.times):
        if merged and start_s <= merged[-1].end_s:
            merged[-1] = Time(merged[-1].start_s, max(end_s, merged[-1].end_s))
        else:
            merged.append(Time(start_s, end_s))
    return merged


def _shared_s(first: Sequence[Time], second: Sequence[Time]) -> float:
    """Return the seconds that lie in both lists of intervals. Each list is disjoint and in order."""
    total_s, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        a, b = first[i], second[j]
        total_s += max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s))
        if a.end_s < b.end_s:
            i += 1
        else:
            j += 1
    return total_s


def _total_s(times: Iterable[Time]) -> float:
    return sum(time.end_s - time.start_s for time in times)
