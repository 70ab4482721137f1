"""Checks, before anything is written, that a disk has enough room."""

from __future__ import annotations

from pathlib import Path

from megatrain_ray.errors import CapacityError
from megatrain_ray.io.files.disk_errors import free_bytes
from megatrain_ray.units import format_bytes


def check_room(folder: Path, needed_bytes: int, what: str, advice: str) -> None:
    """Raise CapacityError unless `needed_bytes` more fit where `folder` is or will be.

    what, advice: what is to be written and what to do about missing room, for the message.
    """
    free = free_bytes(folder)
    if needed_bytes > free:
        raise CapacityError(
            f"no room for {what} in {folder}: up to {format_bytes(needed_bytes)} needed, {format_bytes(free)} free, "
            f"{format_bytes(needed_bytes - free)} missing; {advice}"
        )
