"""What is on the disk, not only in the kernel's memory; and locks that the kernel drops when their holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(*paths: Path) -> None:
    """Brings files, or the names in folders, to the disk. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def take_lock(path: Path) -> int:
    """The descriptor of a locked file, made where it is missing: close it to give the lock up.

    Raises BlockingIOError when another process holds it, of this container or of one that shares the folder.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


@contextmanager
def wait_for_lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of a file, which is made for the block and gone after it. Calls `waiting` before it waits.

    Raises OSError.
    """
    while True:
        try:
            lock = take_lock(path)
        except BlockingIOError:
            waiting()
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_current(lock, path):
            break
        os.close(lock)  # its holder removed the file before we had it
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _is_current(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False
