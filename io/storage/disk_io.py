"""Makes spill files, disk space that the processes of a run share, and chooses the library that reads and writes them.

A spill file is gone when the last of these processes has ended, whatever ended it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.files.disk_errors import DiskFullError, explained
from megatrain_ray.io.storage.blob_store import ALIGN_BYTES, FileStore
from megatrain_ray.units import format_bytes


@dataclass(frozen=True)
class SpillFile:
    """Describes a spill file of `nbytes`, a multiple of ALIGN_BYTES and not 0, on the disk of `folder`."""

    folder: Path
    nbytes: int


def create_spill_file(folder: Path, name: str, nbytes: int) -> int:
    """Return a descriptor of a new file, all zeros, which has its disk space and no name any more.

    Makes `folder` if it does not exist. Raises DiskFullError, MegatrainError, and ValueError for a size that is 0 or no
    multiple of ALIGN_BYTES.
    """
    if nbytes <= 0 or nbytes % ALIGN_BYTES:
        raise ValueError(f"a spill file of {nbytes} bytes; expected a multiple of {ALIGN_BYTES}, and not 0")
    try:
        with explained(f"reserve {format_bytes(nbytes)} ({nbytes} bytes) to spill to in", folder):
            folder.mkdir(parents=True, exist_ok=True)
            return _reserved(folder / name, nbytes)
    except DiskFullError as error:
        raise DiskFullError(f"{error}; lower spill.limit, or set spill.path to a folder with more room") from error
    except MegatrainError as error:
        raise MegatrainError(f"{error}; set spill.path to a folder that can be written") from error


def taken_bytes(fd: int) -> int:
    """Return the bytes that an open file takes on its disk."""
    return 512 * os.fstat(fd).st_blocks


class HeldFiles(FileStore):
    """Stores blobs in files that this process holds open. The name of a blob is the number of its descriptor."""

    def __init__(self) -> None:
        super().__init__(Path("/proc/self/fd"))

    def describe(self, name: str) -> str:
        return str((Path("/proc/self/fd") / name).resolve())


def _reserved(path: Path, nbytes: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        path.unlink()  # before it takes any space: if killed just before this, an empty file stays; later, nothing does
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)  # frees the disk space
        raise
    return fd


class DiskIo(Enum):
    """Names who reads and writes files.

    POSIX: threads of ours, which bypass the page cache.
    KVIKIO: threads of kvikio, an optional dependency (kvikio_store.py).
    """

    POSIX = "posix"
    KVIKIO = "kvikio"


class DiskWay(NamedTuple):
    """Describes how state moves to and from a disk.

    packed: whether floats take fewer bytes on the disk than in memory (packed_store.py).
    """

    io: DiskIo = DiskIo.POSIX
    packed: bool = False

    def __str__(self) -> str:
        return f"{self.io.value} with zstd" if self.packed else self.io.value


PLAIN = DiskWay()


def held_files(io: DiskIo) -> HeldFiles:
    """Return the store of open files. Raises MegatrainError if kvikio cannot be imported."""
    if io is DiskIo.POSIX:
        return HeldFiles()
    from megatrain_ray.io.storage.kvikio_store import KvikioFiles

    return KvikioFiles()
