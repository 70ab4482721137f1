"""Turns errors of the disk into errors that say which file, what happened and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain_ray.errors import MegatrainError
from megatrain_ray.units import format_bytes

FULL = (errno.ENOSPC, errno.EDQUOT)
# The file itself is missing or bad. Other errors may be temporary: permissions, an absent server, too many open files.
GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EUCLEAN)


class DiskFullError(MegatrainError):
    """Says that the file system, or the user's quota of it, has no room."""


class UnreadableError(MegatrainError):
    """Says that a file is missing, ends too early, or cannot be read."""


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block, which did `action` (read, write, …) to `path`, into a MegatrainError.

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
        raise MegatrainError(message) from error


def free_bytes(path: Path) -> int:
    """Return how many bytes a user who is not root can still write at `path`, existing or not, without quotas."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    stats = os.statvfs(there)
    return stats.f_bavail * stats.f_frsize
