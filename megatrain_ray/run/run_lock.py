"""The lock of a run directory: held by one process, released by the kernel when that process dies.

flock goes with the file, not with pids or names: it holds between containers that share the folder, and between
machines on NFS, where the kernel makes it a lock of the server.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain_ray.errors import ConfigError

PRIVATE = 0o700  # of a run's directory: nobody but its owner gets at what is in it, whatever modes that has
GLANCE_S = 0.05  # after which who only looked has let go again


def lock_holder(folder: Path) -> str | None:
    """Who holds the lock of `folder`: process and machine. None: nobody, as far as one may look.

    Takes a share of it for an instant, which `hold_lock` waits for.
    """
    try:
        file = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
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
    """Holds `folder`/lock for the block. The folder is made where it is missing.

    Raises ConfigError where another process holds it (naming it), where the folder cannot be written to, and where its
    file system has no locks. After the block everything made here goes again, the folder and its new parents too, where
    the block put nothing into the folder.
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
        with suppress(OSError):  # what ended the block is to be told
            if lock not in before and set(folder.iterdir()) == {lock, *before}:
                lock.unlink()
                _remove_empty(missing)
        os.close(file)


def _open_and_lock(lock: Path) -> int:
    """A locked file descriptor; the file names this process and its machine or container."""
    has_waited = False
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(file)
            os.close(file)
            if not has_waited:  # it may be somebody who only looks
                has_waited = True
                time.sleep(GLANCE_S)
                continue
            raise ConfigError(
                f"run_dir: {lock.parent} is in use by process {holder}; wait for it, or choose another run_dir"
            ) from None
        except OSError:
            os.close(file)
            raise
        if _is_current(file, lock):
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()} on {platform.node()}\n".encode(), 0)
            return file
        os.close(file)  # its owner removed the file before we locked it


def _holder(file: int) -> str:
    return os.pread(file, 128, 0).decode(errors="replace").strip() or "unknown"


def _is_current(file: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), lock.stat())
    except FileNotFoundError:
        return False


def _remove_empty(folders: list[Path]) -> None:
    """Innermost first; one that others have put something into stays."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
