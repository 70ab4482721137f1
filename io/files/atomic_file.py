"""Writes files durably, replaces them atomically, and takes locks that the kernel releases when their holder dies."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain_ray.errors import DeadlineError
from megatrain_ray.io.files.disk_errors import explained

TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.new")
POLL_S = 0.2
STALL_S = 600.0  # a guess: the files that a process writes into a cache grow many times a second


def sync(*paths: Path) -> None:
    """Flush files, or the entries of folders, from the kernel's memory to disk. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def take_lock(path: Path) -> int:
    """Lock a file, which is made if it is missing, and return its descriptor. Closing that releases the lock.

    Raises BlockingIOError if another process holds it, in this container or in one that shares the folder.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


@contextmanager
def wait_for_lock(
    path: Path, waiting: Callable[[], None], progress: Callable[[], object], stall_s: float = STALL_S
) -> Iterator[None]:
    """Hold the lock of a file, which is made for the block and deleted after it.

    waiting: is called once before this waits for another process.
    progress: returns a value that changes while the other process works.
    stall_s: seconds without such a change after which this gives up.

    The file is deleted only while it is empty, as this function makes it. Raises DeadlineError if the other process
    stalls, and OSError.
    """
    lock = _take_when_free(path, waiting, progress, stall_s)
    try:
        yield
    finally:
        with suppress(OSError):  # an empty file does no harm
            if is_current(lock, path) and not os.fstat(lock).st_size:
                path.unlink(missing_ok=True)
        os.close(lock)


def _take_when_free(path: Path, waiting: Callable[[], None], progress: Callable[[], object], stall_s: float) -> int:
    has_waited, before, since_s = False, None, time.monotonic()
    while True:
        try:
            lock = take_lock(path)
        except BlockingIOError:
            if not has_waited:
                waiting()
                has_waited = True
            now = progress()
            if now != before:
                before, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > stall_s:
                raise DeadlineError(
                    f"another process has held {path} for {stall_s:.0f} s without doing anything: end it, then start "
                    "again"
                ) from None
            time.sleep(POLL_S)
            continue
        if is_current(lock, path):
            return lock
        os.close(lock)  # the holder before us deleted the file between our opening and locking it


def is_current(lock: int, path: Path) -> bool:
    """Return whether `path` still names the file that is open as `lock`, so that nobody has deleted it since."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Replace the file `path` by `text`, given whole or in parts. Durable on return. Raises MegatrainError.

    If the process is killed meanwhile, the old file stays, with a temporary one next to it that `left_by_kills` finds.
    """
    with explained("write", path), temporary_file(path) as temporary:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)


@contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """Yield a new empty file next to `path`. It is deleted after the block unless it was renamed. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def left_by_kills(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the temporary files of files called `names` in a folder that only this program writes."""
    wanted = set(names)
    return [
        file
        for file in sorted(folder.glob(".*.new"))
        if (match := TEMPORARY.fullmatch(file.name)) and match[1] in wanted and stat.S_ISREG(file.lstat().st_mode)
    ]
