"""Who reads and writes the files that a run holds open."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from megatrain_ray.io.storage.spill_file import HeldFiles


class DiskIo(Enum):
    """POSIX: threads of ours, past the page cache. KVIKIO: those of kvikio, an extra (kvikio_store.py)."""

    POSIX = "posix"
    KVIKIO = "kvikio"


class DiskWay(NamedTuple):
    """`packed`: floats take fewer bytes of the disk than they have (packed_store.py). `direct`: it moves memory of a
    device."""

    io: DiskIo = DiskIo.POSIX
    packed: bool = False
    direct: bool = False

    def __str__(self) -> str:
        if self.direct:
            return f"{self.io.value} to the device"
        return f"{self.io.value} with zstd" if self.packed else self.io.value


PLAIN = DiskWay()
DIRECT = DiskWay(DiskIo.KVIKIO, direct=True)


def held_files(io: DiskIo) -> HeldFiles:
    """Raises MegatrainError where kvikio cannot be imported."""
    if io is DiskIo.POSIX:
        return HeldFiles()
    from megatrain_ray.io.storage.kvikio_store import KvikioFiles

    return KvikioFiles()
