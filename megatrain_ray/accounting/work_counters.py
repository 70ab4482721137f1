"""What all processes of a run on its first host did in a step, by what each had done at two times. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatrain_ray.accounting.gpu_work import GpuWork
from megatrain_ray.accounting.shard_work import ShardWork
from megatrain_ray.io.storage.measured_store import Busy, Time


@dataclass(frozen=True)
class RunWork:
    """What has been done at some time."""

    shards: Sequence[ShardWork]
    gpus: Sequence[GpuWork]


@dataclass(frozen=True)
class StepWork:
    """Of one step. `update_s`: of the shard that took longest. `disk_bytes`: read and written, by all processes;
    `weight_bytes`, `activation_bytes`: of these by GPU workers. `disk_s`: in which something of that was under way,
    whoever moved it. `spill_bytes`: that all files take on the disk."""

    update_s: float
    disk_bytes: float = 0.0
    disk_s: float = 0.0
    spill_bytes: int = 0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0


def work_between(before: RunWork | None, after: RunWork | None) -> StepWork | None:
    """A step's mean. None where somebody did not answer or was replaced, or no step and no update lies between them."""
    if before is None or after is None:
        return None
    pairs = list(zip(before.shards, after.shards, strict=False))
    of_gpus = [(a, b, b.num_steps - a.num_steps) for a, b in zip(before.gpus, after.gpus, strict=False)]
    same = _pids(before) == _pids(after)
    # Where everything lives on the device shards make no update at all.
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
    """Of the newest steps, those of the first GPU, as far as all processes still know when they moved something."""
    every = [*(shard.busy for shard in work.shards), *(busy for gpu in work.gpus for busy in gpu.busy)]
    since_s = max(busy.since_s for busy in every)
    steps = work.gpus[0].steps[-num_steps:]
    known = [Time(max(step.start_s, since_s), step.end_s) for step in steps if step.end_s > since_s]
    known_s = _total_s(known)
    if not known_s:
        return 0.0
    return _shared_s(_union(every), known) / known_s * statistics.mean(step.end_s - step.start_s for step in steps)


def _union(every: Iterable[Busy]) -> list[Time]:
    """One after the other, when at least one of them was busy."""
    merged: list[Time] = []
    for start_s, end_s in sorted(time for busy in every for time in busy.times):
        if merged and start_s <= merged[-1].end_s:
            merged[-1] = Time(merged[-1].start_s, max(end_s, merged[-1].end_s))
        else:
            merged.append(Time(start_s, end_s))
    return merged


def _shared_s(first: Sequence[Time], second: Sequence[Time]) -> float:
    """Both one after the other."""
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
