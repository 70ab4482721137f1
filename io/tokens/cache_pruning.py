"""Deletes folders of the token cache whose input files have changed or that nothing has used for a long time.

A folder counts as used whenever it is found or made: the modification time of its meta.json records that. A process
that maps the files of a folder holds a shared lock on its meta.json. Pruning needs the exclusive lock, so no folder is
deleted while a run reads it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from megatrain_ray.io.files.atomic_file import POLL_S
from megatrain_ray.io.files.file_identity import file_identity
from megatrain_ray.io.files.owned_folder import FolderKind, NotOwnedError, remove_owned, why_not_owned
from megatrain_ray.io.tokens.token_files import META_NAME, VERSION
from megatrain_ray.read_file import parse_json

UNUSED_DAYS = 30
HELD_S = 10.0  # a pruning process holds the lock of one folder for less time than this
STRANGE = (ValueError, KeyError, TypeError, IndexError)  # raised when a meta.json of another program is read


def mark_used(folder: Path) -> None:
    """Set the last use of a folder of tokens to now. Does nothing in a cache that can only be read."""
    with suppress(OSError):
        os.utime(folder / META_NAME)


@contextmanager
def held(folders: Sequence[Path]) -> Iterator[None]:
    """Keep other processes from pruning these folders during the block, where the file system has locks."""
    with ExitStack() as locks:
        for folder in folders:
            with suppress(OSError):
                lock = os.open(folder / META_NAME, os.O_RDONLY | os.O_CLOEXEC)
                locks.callback(os.close, lock)
                _share(lock)
        yield


def is_held(folder: Path) -> bool:
    """Return whether a process reads the folder (`held`); False where the file system has no locks."""
    try:
        lock = os.open(folder / META_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def _share(lock: int) -> None:
    """Take the shared lock. Raises BlockingIOError if a pruning process holds the exclusive one for HELD_S."""
    deadline_s = time.monotonic() + HELD_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(POLL_S)


def prune(root: Path) -> int:
    """Delete the folders of a cache that are outdated or unused and carry its mark, and return the bytes freed."""
    freed_bytes = 0
    for folder in _folders(root):
        with suppress(OSError, *STRANGE):
            freed_bytes += _remove(folder)
    return freed_bytes


def without_mark(root: Path) -> list[Path]:
    """Return the folders of tokens that are never deleted: earlier releases made them, or a person did."""
    return [folder for folder in _folders(root) if why_not_owned(folder, FolderKind.TOKENS)]


def size_of(root: Path) -> tuple[int, int]:
    """Return the number of folders of tokens in a cache and their total size in bytes."""
    folders = list(_folders(root))
    return len(folders), sum(map(_bytes_of, folders))


def _folders(root: Path) -> Iterator[Path]:
    return (meta.parent for meta in sorted(root.glob(f"[!.]*/{META_NAME}")))


def _remove(folder: Path) -> int:
    """Delete a folder of tokens and return the bytes freed; 0 if it is still wanted or in use.

    Raises OSError, and the errors of STRANGE for a meta.json of another program.
    """
    lock = os.open(folder / META_NAME, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_given_up(folder) or why_not_owned(folder, FolderKind.TOKENS):
            return 0
        gone = folder.rename(folder.with_name(f".{folder.name}.pruned.partial"))
    finally:
        os.close(lock)
    num_bytes = _bytes_of(gone)
    with suppress(NotOwnedError, OSError):
        remove_owned(gone, FolderKind.TOKENS)
    return num_bytes


def _is_given_up(folder: Path) -> bool:
    meta = folder / META_NAME
    if time.time() - meta.stat().st_mtime > UNUSED_DAYS * 86400:
        return True
    provenance = parse_json(meta.read_bytes())["provenance"]
    return provenance["version"] != VERSION or any(map(_has_changed, provenance["files"]))


def _has_changed(identity: list[Any]) -> bool:
    """Return whether a file differs from its recorded identity. A missing one may be on a disk that is not mounted."""
    try:
        return file_identity(Path(identity[0])) != identity
    except OSError:
        return False


def _bytes_of(folder: Path) -> int:
    total = 0
    for file in folder.iterdir():
        with suppress(OSError):
            total += file.stat().st_size
    return total
