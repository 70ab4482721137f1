"""Who reads and writes the files that a run holds open."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from megatrain_ray.io.spill_file import HeldFiles


class DiskIo(Enum):
    """POSIX: threads of ours, past the page cache. KVIKIO: those of kvikio, an extra (kvikio_store.py)."""

    POSIX = "posix"
    KVIKIO = "kvikio"


class DiskWay(NamedTuple):
    """`packed`: floats take fewer bytes of the disk than they have (packed_store.py)."""

    io: DiskIo = DiskIo.POSIX
    packed: bool = False

    def __str__(self) -> str:
        return f"{self.io.value} with zstd" if self.packed else self.io.value


PLAIN = DiskWay()


def held_files(io: DiskIo) -> HeldFiles:
    """Raises MegatrainError where kvikio cannot be imported."""
    if io is DiskIo.POSIX:
        return HeldFiles()
    from megatrain_ray.io.kvikio_store import KvikioFiles

    return KvikioFiles()
