"""Who keeps a run's arenas and spill files alive: any process that holds their descriptors, mapped or not."""

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
    """Descriptors of all arenas and spill files of a run, by what they hold. As long as one holder lives the others can
    attach."""

    def __init__(self, handles: Handles) -> None:
        """`handles`: of this process. Use `create` or `adopt`."""
        self._handles = dict(handles)

    @classmethod
    def create(cls, sizes: Mapping[str, int], files: Mapping[str, SpillFile] = {}) -> ArenaHolder:
        """New arenas of these sizes in bytes, and spill files of other names, all zeros.

        Raises MegatrainError, DiskFullError.
        """
        # A name that no other run has: a descriptor number that was given out again cannot be taken for ours.
        run = f"megatrain-{secrets.token_hex(4)}"
        holder = cls({})
        try:
            for name, nbytes in sizes.items():
                holder._handles[name] = _create(f"{run}-{name}", nbytes)
            for name, file in files.items():
                holder._handles[name] = _create_on_disk(f"{run}-{name}", file)
        except MegatrainError:
            holder.close()
            raise
        return holder

    @classmethod
    def adopt(cls, holders: Sequence[Handles]) -> ArenaHolder:
        """Holds what others hold too; they may be dead, but for one. Raises MegatrainError when all are."""
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
        """For `adopt` in any process of this machine."""
        return dict(self._handles)

    def map(self, name: str) -> Arena:
        """The arena's memory in this process; it stays mapped when the holder is closed."""
        handle = self._handles[name]
        if handle.path:
            raise ValueError(f"{name} is the file {handle.path}, and no memory")
        return Arena(handle.fd, handle)

    def spill(self, name: str, io: DiskIo) -> tuple[BlobStore, str]:
        """The store, by `io`, whose `update` opens the spill file, and its name there.

        A file that is open stays so when the holder is closed.
        """
        handle = self._handles[name]
        if not handle.path:
            raise ValueError(f"{name} is an arena, and no file")
        return held_files(io), str(handle.fd)

    def close(self) -> None:
        """Gives the descriptors up. Idempotent."""
        for handle in self._handles.values():
            os.close(handle.fd)
        self._handles = {}


def _create(name: str, nbytes: int) -> ArenaHandle:
    return ArenaHandle(os.getpid(), create_memfd(name, nbytes), nbytes, name)


def _create_on_disk(name: str, file: SpillFile) -> ArenaHandle:
    fd = create_spill_file(file.folder, name, file.nbytes)
    return ArenaHandle(os.getpid(), fd, file.nbytes, name, str(Path(f"/proc/self/fd/{fd}").readlink()))


def _open_first(handles: Iterable[ArenaHandle]) -> tuple[int, ArenaHandle]:
    errors = []
    for handle in handles:
        try:
            return open_held(handle), handle
        except MegatrainError as error:
            errors.append(str(error))
    raise MegatrainError("; ".join(errors))
