"""Defines what an optimizer shard reports about its work: seconds and bytes of a step that only its process knows."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain_ray.io.storage.measured_store import NEVER, NOTHING, Busy, Moved


@dataclass(frozen=True)
class ShardWork:
    """Counts what an optimizer shard has done since its process began, up to the end of an update of all layers.

    pid: id of the process.
    update: number of the last update; 0 before the first.
    update_s: seconds in which the update kernel worked.
    moved: bytes of spilled state and gradients, read from disk and written to it.
    busy: when such transfers were under way, up to now.
    spill_bytes: bytes that the spill file takes on the disk.
    """

    pid: int
    update: int
    update_s: float
    moved: Moved = NOTHING
    busy: Busy = NEVER
    spill_bytes: int = 0
