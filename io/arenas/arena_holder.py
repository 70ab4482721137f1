"""Provides arenas, host memory that the processes of a run share, and keeps them and spill files alive.

An arena is freed when the last process that holds its file descriptor or maps it has ended, whatever ended it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.storage.blob_store import BlobStore
from megatrain_ray.io.storage.disk_io import DiskIo, SpillFile, create_spill_file, held_files

HUGE_PAGE = 2 << 20
# An arena is several files, one after the other in memory, because the kernel adds pages to a file one at a time: on 16
# cores, 16 threads took 4.1 GiB/s of pages of 4 KiB for one file, and 13.7 GiB/s for 16 files.
MAX_PIECES, MIN_PIECE_BYTES = 16, 256 << 20
POPULATE_BYTES = 64 << 20  # that a thread populates at a time
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # of Linux on x86 and Arm; the mmap module has no names for them
MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it


@dataclass(frozen=True)
class ArenaHandle:
    """Locates an arena or a spill file: file descriptor `fd` of process `pid`.

    That process may have mapped it, or only hold the descriptor.

    nbytes: the size that was asked for. An arena's mapping has `mapped_bytes(nbytes)`.
    path: the spill file's path as the kernel names it; empty for an arena.
    more: descriptors of an arena's further pieces (`piece_sizes`).
    """

    pid: int
    fd: int
    nbytes: int
    name: str
    path: str = ""
    more: tuple[int, ...] = ()

    @property
    def fds(self) -> tuple[int, ...]:
        return self.fd, *self.more


Handles = Mapping[str, ArenaHandle]  # by name


def create_memfd(name: str, nbytes: int) -> int:
    """Return a file descriptor of new shared memory: `mapped_bytes(nbytes)` zeros. Raises MegatrainError.

    name: of the arena that it is a piece of.

    It takes no RAM until it is touched. It lives as long as a process holds the descriptor, even without mapping it.
    """
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.truncate(fd, mapped_bytes(nbytes))
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise MegatrainError(f"cannot create arena {name} of {nbytes} bytes: {error.strerror}") from None
    return fd


def mapped_bytes(nbytes: int) -> int:
    """Return the size of an arena's mapping: whole huge pages, at least one, as nothing cannot be mapped."""
    return max(1, -(-nbytes // HUGE_PAGE)) * HUGE_PAGE


def piece_sizes(nbytes: int) -> list[int]:
    """Return the sizes of the files of an arena, in whole huge pages."""
    total = mapped_bytes(nbytes)
    piece = max(MIN_PIECE_BYTES, mapped_bytes(-(-total // MAX_PIECES)))
    return [min(piece, total - start) for start in range(0, total, piece)]


def _mapped(fds: Sequence[int], sizes: Sequence[int]) -> memoryview:
    """Map these files, one after the other, and return their bytes, which keep the mapping alive."""
    mapping, start = (mmap.mmap(fds[0], sizes[0]), 0) if len(fds) == 1 else _join(fds, sizes)
    with suppress(OSError):  # kernels without huge pages in shared memory refuse the advice
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)[start : start + sum(sizes)]


def _join(fds: Sequence[int], sizes: Sequence[int]) -> tuple[mmap.mmap, int]:
    """Return a mapping of several files, and the index of their first byte in it, at an address for huge pages."""
    # Private memory that nobody touches reserves the addresses. The object that reserved them unmaps all of them.
    # Kernels before 6.7 reserve at addresses of small pages, where files would get no huge ones.
    mapping = mmap.mmap(-1, sum(sizes) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    reserved = np.frombuffer(mapping, np.uint8).ctypes.data
    first = address = -(-reserved // HUGE_PAGE) * HUGE_PAGE
    map_at = ctypes.CDLL(None, use_errno=True).mmap
    map_at.restype = ctypes.c_void_p
    map_at.argtypes = ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long
    for fd, size in zip(fds, sizes, strict=True):
        if map_at(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, 0) != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        address += size
    return mapping, first - reserved


class Arena:
    """Maps shared memory into this process."""

    def __init__(self, handle: ArenaHandle) -> None:
        """Map the descriptors, which the caller keeps and closes. `ArenaHolder.map` creates arenas."""
        self.handle = handle
        self._buffer: memoryview | None = _mapped(handle.fds, piece_sizes(handle.nbytes))

    @property
    def buffer(self) -> memoryview:
        """Return the whole mapping: `handle.nbytes` bytes, then zeros. Raises MegatrainError after `close`."""
        if self._buffer is None:
            raise MegatrainError(f"arena {self.handle.name} is closed in this process")
        return self._buffer

    def populate(self, threads: int) -> None:
        """Take the RAM of all bytes now, in `threads` threads. Contents stay. Raises MegatrainError."""
        sizes = piece_sizes(self.handle.nbytes)
        # The first portion of every piece, then every second one: threads work on different files.
        portions = [
            start
            for offset in range(0, sizes[0], POPULATE_BYTES)
            for start in (i * sizes[0] + offset for i, size in enumerate(sizes) if offset < size)
            if start < self.handle.nbytes
        ]
        try:
            with ThreadPoolExecutor(threads, thread_name_prefix="populate") as pool:
                list(pool.map(self._populate_portion, portions))  # raises the first error
        except OSError as error:
            raise MegatrainError(
                f"cannot take {self.handle.nbytes} bytes of RAM for arena {self.handle.name}: {error.strerror}"
            ) from None

    def close(self) -> None:
        """Release this process's mapping. Views still in use keep it mapped until they are gone. Idempotent."""
        # Drop the reference; never release or unmap. torch.frombuffer keeps the object but not the buffer's export, so
        # a release would succeed and leave its tensors without memory.
        self._buffer = None

    def _populate_portion(self, start: int) -> None:
        piece = piece_sizes(self.handle.nbytes)[0]
        stop = min(start + POPULATE_BYTES, start - start % piece + piece, self.handle.nbytes)
        portion = np.frombuffer(self.buffer, np.uint8)[start:stop]
        # Not mmap.madvise: it keeps the GIL while pages are zeroed, so threads would run one after the other.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        if not madvise(ctypes.c_void_p(portion.ctypes.data), ctypes.c_size_t(portion.size), MADV_POPULATE_WRITE):
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise OSError(code, os.strerror(code))
        portion[:: mmap.PAGESIZE].max()  # older kernels: in shared memory a read allocates the page too


def open_held(handle: ArenaHandle) -> ArenaHandle:
    """Return a handle of this process for what another process of this machine holds.

    Raises MegatrainError if the holder is gone, its pid now belongs to another process, or it lives in another PID
    namespace.
    """
    sizes = [handle.nbytes] if handle.path else piece_sizes(handle.nbytes)
    if len(handle.fds) != len(sizes):
        raise _unreachable(handle, f"it has {len(handle.fds)} files, and {len(sizes)} were expected")
    opened: list[int] = []
    try:
        for fd, size in zip(handle.fds, sizes, strict=True):
            opened.append(_open_file(handle, fd, size))
    except MegatrainError:
        for fd in opened:
            os.close(fd)
        raise
    return replace(handle, pid=os.getpid(), fd=opened[0], more=tuple(opened[1:]))


def _open_file(handle: ArenaHandle, held_fd: int, nbytes: int) -> int:
    path = Path(f"/proc/{handle.pid}/fd/{held_fd}")
    try:
        target = str(path.readlink())
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _unreachable(handle, f"{path}: {error.strerror}") from None
    is_named_so = target == handle.path if handle.path else target.startswith(f"/memfd:{handle.name} ")
    if not is_named_so or os.fstat(fd).st_size != nbytes:
        os.close(fd)
        raise _unreachable(handle, f"{path} is {target}")
    return fd


def _unreachable(handle: ArenaHandle, found: str) -> MegatrainError:
    what = "spill file" if handle.path else "arena"
    return MegatrainError(
        f"cannot attach {what} {handle.name} ({handle.nbytes} bytes) of process {handle.pid}: {found}; the process "
        "that held it is gone, belongs to another user, or lives in another PID namespace: run all processes of a run "
        "as one user in one container"
    )


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
                fds: list[int] = []
                for size in piece_sizes(nbytes):
                    fds.append(create_memfd(f"{run}-{name}", size))
                    holder._handles[name] = ArenaHandle(
                        os.getpid(), fds[0], nbytes, f"{run}-{name}", more=tuple(fds[1:])
                    )
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
                holder._handles[name] = _open_first([handles[name] for handles in holders])
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
        return Arena(handle)

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
        for fd in (fd for handle in self._handles.values() for fd in handle.fds):
            os.close(fd)
        self._handles = {}


def _open_first(handles: Iterable[ArenaHandle]) -> ArenaHandle:
    errors = []
    for handle in handles:
        try:
            return open_held(handle)
        except MegatrainError as error:
            errors.append(str(error))
    raise MegatrainError("; ".join(errors))
