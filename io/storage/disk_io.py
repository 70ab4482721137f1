"""Chooses the library that reads and writes the files that a run holds open."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from megatrain_ray.io.storage.spill_file import HeldFiles


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
