"""Turns errors of the disk into errors that say which file, what happened and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain_ray.errors import CapacityError, MegatrainError
from megatrain_ray.units import format_bytes

FULL = (errno.ENOSPC, errno.EDQUOT)
# The file itself is missing or bad. Other errors may be temporary: permissions, an absent server, too many open files.
GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EUCLEAN)


class DiskError(MegatrainError):
    """Says that a call to the file system failed."""


class DiskFullError(DiskError):
    """Says that the file system, or the user's quota of it, has no room."""


class UnreadableError(DiskError):
    """Says that a file is missing, ends too early, or cannot be read."""


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block, which did `action` (read, write, …) to `path`, into a DiskError.

    Raises UnreadableError if a read failed because the file is missing or bad, DiskFullError if there was no room.
    """
    try:
        yield
    except OSError as error:
        message = f"cannot {action} {path}: {error.strerror or error}"
        if error.errno in FULL:
            raise DiskFullError(f"{message}, {format_bytes(free_bytes(path))} are free there") from error
        if action == "read" and error.errno in GONE:
            raise UnreadableError(message) from error
        raise DiskError(message) from error


def free_bytes(path: Path) -> int:
    """Return how many bytes a user who is not root can still write at `path`, existing or not, without quotas."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    stats = os.statvfs(there)
    return stats.f_bavail * stats.f_frsize


def check_room(folder: Path, needed_bytes: int, what: str, advice: str) -> None:
    """Raise CapacityError, naming `what` and `advice`, unless `needed_bytes` more fit where `folder` is or will be."""
    free = free_bytes(folder)
    if needed_bytes > free:
        raise CapacityError(
            f"no room for {what} in {folder}: up to {format_bytes(needed_bytes)} needed, {format_bytes(free)} free, "
            f"{format_bytes(needed_bytes - free)} missing; {advice}"
        )
