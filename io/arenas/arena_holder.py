"""Keeps a run's arenas and spill files alive.

Any process that holds their file descriptors does so, whether it maps them or not.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.arenas.arena import Arena, ArenaHandle, create_memfd, open_held
from megatrain_ray.io.storage.blob_store import BlobStore
from megatrain_ray.io.storage.disk_io import DiskIo, held_files
from megatrain_ray.io.storage.spill_file import SpillFile, create_spill_file

Handles = Mapping[str, ArenaHandle]


class ArenaHolder:
    """Holds descriptors of a run's arenas and spill files, by name. While one holder lives, processes can attach."""

    def __init__(self, handles: Handles) -> None:
        """Hold these descriptors of this process. Use `create` or `adopt` instead."""
        self._handles = dict(handles)

    @classmethod
    def create(cls, sizes: Mapping[str, int], files: Mapping[str, SpillFile] = {}) -> ArenaHolder:
        """Create new arenas and spill files, all zeros. Raises MegatrainError, DiskFullError.

        sizes: bytes of each arena, by name.
        files: spill files, by names that no arena has.
        """
        # A name that no other run has. So a descriptor number that the kernel reused cannot be mistaken for ours.
        run = f"megatrain-{secrets.token_hex(4)}"
        holder = cls({})
        try:
            for name, nbytes in sizes.items():
                fd = create_memfd(f"{run}-{name}", nbytes)
                holder._handles[name] = ArenaHandle(os.getpid(), fd, nbytes, f"{run}-{name}")
            for name, file in files.items():
                fd = create_spill_file(file.folder, f"{run}-{name}", file.nbytes)
                path = str(Path(f"/proc/self/fd/{fd}").readlink())
                holder._handles[name] = ArenaHandle(os.getpid(), fd, file.nbytes, f"{run}-{name}", path)
        except MegatrainError:
            holder.close()
            raise
        return holder

    @classmethod
    def adopt(cls, holders: Sequence[Handles]) -> ArenaHolder:
        """Return a holder of what these others hold. Raises MegatrainError unless one of them is alive."""
        holder = cls({})
        try:
            for name in holders[0]:
                fd, handle = _open_first([handles[name] for handles in holders])
                holder._handles[name] = replace(handle, pid=os.getpid(), fd=fd)
        except MegatrainError:
            holder.close()
            raise
        return holder

    @property
    def handles(self) -> dict[str, ArenaHandle]:
        return dict(self._handles)

    def map(self, name: str) -> Arena:
        """Map the arena into this process. It stays mapped after the holder is closed."""
        handle = self._handles[name]
        if handle.path:
            raise ValueError(f"{name} is the file {handle.path}, and no memory")
        return Arena(handle.fd, handle)

    def spill(self, name: str, io: DiskIo) -> tuple[BlobStore, str]:
        """Return a store that can open the spill file with `update`, and the file's name in that store.

        A file that is open stays open when the holder is closed.
        """
        handle = self._handles[name]
        if not handle.path:
            raise ValueError(f"{name} is an arena, and no file")
        return held_files(io), str(handle.fd)

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        for handle in self._handles.values():
            os.close(handle.fd)
        self._handles = {}


def _open_first(handles: Iterable[ArenaHandle]) -> tuple[int, ArenaHandle]:
    errors = []
    for handle in handles:
        try:
            return open_held(handle), handle
        except MegatrainError as error:
            errors.append(str(error))
    raise MegatrainError("; ".join(errors))
