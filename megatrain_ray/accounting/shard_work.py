"""What an optimizer shard has done: what of a step's seconds and bytes only its process can tell."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain_ray.io.storage.measured_store import NEVER, NOTHING, Busy, Moved


@dataclass(frozen=True)
class ShardWork:
    """Since the process began, up to the end of an update of all layers. `update`: its number, 0 before the first.
    `update_s`: seconds in which the kernel worked. `moved`: on the disk, of what spills. `busy`: when some of it was
    under way, up to now. `spill_bytes`: that its file takes on the disk."""

    pid: int
    update: int
    update_s: float
    moved: Moved = NOTHING
    busy: Busy = NEVER
    spill_bytes: int = 0
