"""Blobs: named byte strings, written and read in aligned blocks, in memory or in files."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import aiofiles

from megatrain_ray.io.disk_errors import UnreadableError, explained

ALIGN_BYTES = 4096  # of O_DIRECT: file offset, size and address

T = TypeVar("T")


class BlobWriter(Protocol):
    """A blob that is being written. Blocks may be written in any order, several at the same time."""

    async def write_at(self, offset: int, block: memoryview) -> None:
        """`offset`, the block's size and its address are multiples of ALIGN_BYTES (see `aligned_block`)."""


class BlobStore(Protocol):
    """Every method raises MegatrainError naming the blob: UnreadableError when it cannot be read, DiskFullError."""

    def create(self, name: str) -> AbstractAsyncContextManager[BlobWriter]:
        """A new blob, or another one in its place: durable when the block has ended well, else not to be used."""

    async def read_into(self, name: str, offset: int, block: memoryview) -> None:
        """Fills `block`, writable and aligned as for `write_at`. Raises UnreadableError when the blob ends before."""

    async def size(self, name: str) -> int:
        """Bytes of a blob."""

    def describe(self, name: str) -> str:
        """Where a blob is, for messages."""


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def aligned_block(nbytes: int) -> memoryview:
    """Zeros at a multiple of ALIGN_BYTES, `aligned(nbytes)` of them; pages are taken when they are touched."""
    return memoryview(mmap.mmap(-1, max(ALIGN_BYTES, aligned(nbytes))))


class MemoryStore:
    """Blobs in this process's memory."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytearray] = {}

    @asynccontextmanager
    async def create(self, name: str) -> AsyncIterator[BlobWriter]:
        blob = self._blobs[name] = bytearray()
        yield _MemoryBlob(blob)

    async def read_into(self, name: str, offset: int, block: memoryview) -> None:
        part = self._blob(name)[offset : offset + len(block)]
        if len(part) < len(block):
            raise _too_short(self.describe(name), offset + len(block), len(self._blob(name)))
        block[:] = part

    async def size(self, name: str) -> int:
        return len(self._blob(name))

    def describe(self, name: str) -> str:
        return f"{name} in memory"

    def _blob(self, name: str) -> bytearray:
        if name not in self._blobs:
            raise UnreadableError(f"cannot read {self.describe(name)}: there is no such blob")
        return self._blobs[name]


class _MemoryBlob:
    def __init__(self, blob: bytearray) -> None:
        self._blob = blob

    async def write_at(self, offset: int, block: memoryview) -> None:
        self._blob.extend(bytes(max(0, offset - len(self._blob))))
        self._blob[offset : offset + len(block)] = block


class FileStore:
    """Blobs as files of one folder, past the page cache (O_DIRECT) where the file system can."""

    def __init__(self, folder: Path, folder_fd: int | None = None) -> None:
        """`folder` exists. `folder_fd`: open on it as long as blobs are created; they are in this very folder then, not
        in another one that took its name."""
        self._folder = folder
        self._folder_fd = folder_fd

    @staticmethod
    @contextmanager
    def to_write(folder: Path) -> Iterator[FileStore]:
        """Raises MegatrainError where there is no such folder."""
        with explained("write", folder):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield FileStore(folder, fd)
        finally:
            os.close(fd)

    @asynccontextmanager
    async def create(self, name: str) -> AsyncIterator[BlobWriter]:
        path = self._folder / name
        opener = partial(_open_direct, folder_fd=self._folder_fd)
        with explained("write", path):
            file = await aiofiles.open(path if self._folder_fd is None else name, "wb", buffering=0, opener=opener)
        try:
            yield _FileBlob(path, file.fileno())
            with explained("write", path):
                await _completed(os.fsync, file.fileno())
        finally:
            await file.close()

    async def read_into(self, name: str, offset: int, block: memoryview) -> None:
        path = self._folder / name
        with explained("read", path):
            async with aiofiles.open(path, "rb", buffering=0, opener=_open_direct) as file:
                got = await _completed(_read_all, file.fileno(), offset, block)
            if got < len(block):
                raise _too_short(str(path), offset + len(block), path.stat().st_size)

    async def size(self, name: str) -> int:
        with explained("read", self._folder / name):
            return (self._folder / name).stat().st_size

    def describe(self, name: str) -> str:
        return str(self._folder / name)


class _FileBlob:
    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    async def write_at(self, offset: int, block: memoryview) -> None:
        with explained("write", self._path):
            await _completed(_write_all, self._fd, offset, block)


async def _completed(call: Callable[..., T], *arguments: object) -> T:
    """In a thread, which is through with it even when the task was cancelled: its descriptor is closed after this."""
    done = asyncio.get_running_loop().run_in_executor(None, partial(call, *arguments))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait([done])
        raise


def _write_all(fd: int, offset: int, block: memoryview) -> None:
    while block:
        written = _transfer(fd, partial(os.pwrite, fd, block, offset))
        block, offset = block[written:], offset + written


def _read_all(fd: int, offset: int, block: memoryview) -> int:
    """Bytes read: fewer than the block's at the end of the file only."""
    total = 0
    while total < len(block):
        got = _transfer(fd, partial(os.preadv, fd, [block[total:]], offset + total))
        if not got:
            break
        total += got
    return total


def _transfer(fd: int, call: Callable[[], int]) -> int:
    """Some file systems open a file for O_DIRECT and then refuse the transfer: once more through the page cache."""
    try:
        return call()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return call()


def _open_direct(path: str, flags: int, folder_fd: int | None = None) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666, dir_fd=folder_fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666, dir_fd=folder_fd)


def _too_short(where: str, expected: int, got: int) -> UnreadableError:
    return UnreadableError(f"{where} is truncated: expected at least {expected} bytes, got {got}")
