"""What an optimizer shard has done: what of a step's seconds and bytes only its process can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardWork:
    """Since the process began, up to the end of an update of all layers. `update`: its number, 0 before the first.
    `update_s`: seconds in which the kernel worked. `disk_bytes`, `disk_s`: read and written of state that spills, and
    the seconds in which some of it was under way. `spill_bytes`: that its file takes on the disk."""

    pid: int
    update: int
    update_s: float
    disk_bytes: int
    disk_s: float
    spill_bytes: int


@dataclass(frozen=True)
class StepWork:
    """Of one step, all shards together: seconds of the one that took longest, bytes of all."""

    update_s: float
    disk_bytes: float
    disk_s: float
    spill_bytes: int


def work_between(before: Sequence[ShardWork], after: Sequence[ShardWork]) -> StepWork | None:
    """A step's mean, by what each shard had done at two times. None where no update lies between them, or a shard was
    replaced."""
    pairs = list(zip(before, after, strict=False))
    same = len(before) == len(after) and all(a.pid == b.pid for a, b in pairs)
    if not pairs or not same or any(b.update <= a.update for a, b in pairs):
        return None
    counts = [b.update - a.update for a, b in pairs]
    steps = list(zip(pairs, counts, strict=True))
    return StepWork(
        update_s=max((b.update_s - a.update_s) / count for (a, b), count in steps),
        disk_bytes=sum((b.disk_bytes - a.disk_bytes) / count for (a, b), count in steps),
        disk_s=max((b.disk_s - a.disk_s) / count for (a, b), count in steps),
        spill_bytes=sum(work.spill_bytes for work in after),
    )
