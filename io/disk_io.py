"""Who reads and writes the files that a run holds open."""

from __future__ import annotations

from enum import Enum

from megatrain_ray.io.spill_file import HeldFiles


class DiskIo(Enum):
    """POSIX: threads of ours, past the page cache. KVIKIO: those of kvikio, an extra (kvikio_store.py)."""

    POSIX = "posix"
    KVIKIO = "kvikio"


def held_files(io: DiskIo) -> HeldFiles:
    """Raises MegatrainError where kvikio cannot be imported."""
    if io is DiskIo.POSIX:
        return HeldFiles()
    from megatrain_ray.io.kvikio_store import KvikioFiles

    return KvikioFiles()
