"""Whether there is room on a disk, asked before anything is written."""

from __future__ import annotations

from pathlib import Path

from megatrain_ray.errors import CapacityError
from megatrain_ray.io.files.disk_errors import free_bytes
from megatrain_ray.units import format_bytes


def check_room(folder: Path, needed_bytes: int, what: str, advice: str) -> None:
    """Raises CapacityError, with the arithmetic and `advice`, unless `needed_bytes` more fit where `folder` is or will
    be."""
    free = free_bytes(folder)
    if needed_bytes > free:
        raise CapacityError(
            f"no room for {what} in {folder}: up to {format_bytes(needed_bytes)} needed, {format_bytes(free)} free, "
            f"{format_bytes(needed_bytes - free)} missing; {advice}"
        )
