"""Locks a run directory. One process holds the lock, and the kernel releases it when that process dies.

flock belongs to the file, not to pids or names. So it works between containers that share the folder, and between
machines on NFS, where the kernel makes it a lock of the server.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.files.atomic_file import is_current
from megatrain_ray.read_file import regular_file

PRIVATE = 0o700  # mode of a run's directory: only its owner can reach the files in it, whatever their modes
LOCK_LINE = re.compile(rb"(\d+ on .*\n)?")  # what a lock holds: nothing, or the process that held it last
GLANCE_S = 0.05  # seconds after which a process that only looked (`lock_holder`) has released the lock


def lock_holder(folder: Path) -> str | None:
    """Return who holds the lock of `folder`, process and machine. None: nobody, as far as this process may look.

    Takes a shared lock for an instant, which `hold_lock` waits for.
    """
    try:
        file = os.open(regular_file(folder / "lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(file)
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(file)
    return None


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Hold `folder`/lock for the block. Creates the folder if it is missing.

    Raises ConfigError if another process holds the lock (naming it), if the folder cannot be written to, and if its
    file system has no locks. If the block has put nothing into the folder, everything that was created here is removed
    after it: the lock, the folder and its new parents.
    """
    lock = folder / "lock"
    before: set[Path] | None = None
    missing: list[Path] = []
    try:
        before = set(folder.iterdir()) if folder.is_dir() else set()
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(PRIVATE, parents=True, exist_ok=True)
        file = _open_and_lock(lock)
    except OSError as error:
        if before is not None and lock not in before:
            with suppress(OSError):
                lock.unlink()
        _remove_empty(missing)
        raise ConfigError(
            f"run_dir: cannot write to {folder}: {error.strerror}; choose a folder that can be written to and locked"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # the error that ended the block must be reported
            if lock not in before and set(folder.iterdir()) == {lock, *before}:
                lock.unlink()
                _remove_empty(missing)
        os.close(file)


def _open_and_lock(lock: Path) -> int:
    """Return a locked file descriptor, after writing this process and its machine or container into the file."""
    has_waited = False
    while True:
        with ExitStack() as closing:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            closing.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if has_waited:
                    raise ConfigError(
                        f"run_dir: {lock.parent} is in use by process {_holder(file)}; wait for it, or choose another "
                        "run_dir"
                    ) from None
                has_waited = True
                time.sleep(GLANCE_S)  # the holder may be a process that only looks
                continue
            if not is_current(file, lock):  # its owner removed the file before we locked it
                continue
            if not LOCK_LINE.fullmatch(os.pread(file, 512, 0)):
                raise ConfigError(f"run_dir: {lock} is no lock of a run: move it away, or choose another run_dir")
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()} on {platform.node()}\n".encode(), 0)
            closing.pop_all()
            return file


def _holder(file: int) -> str:
    return os.pread(file, 128, 0).decode(errors="replace").strip() or "unknown"


def _remove_empty(folders: list[Path]) -> None:
    """Remove empty folders, innermost first. A folder into which others have put something stays."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
