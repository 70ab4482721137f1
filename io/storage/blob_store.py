"""Stores blobs: named byte strings, written and read in aligned blocks, in files."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import aiofiles

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.files.disk_errors import UnreadableError, explained

ALIGN_BYTES = 4096  # O_DIRECT needs file offset, size and address to be multiples of this

T = TypeVar("T")


class BlobWriter(Protocol):
    """Writes a blob. Blocks may be written in any order, several at the same time."""

    async def write_at(self, offset: int, block: memoryview) -> None:
        """Write a block. Offset, size and address of the block are multiples of ALIGN_BYTES (see `aligned_block`)."""


class Blob(BlobWriter, Protocol):
    """Reads and writes a blob in place. Its size stays: `write_at` raises MegatrainError past its end."""

    async def read_into(self, offset: int, block: memoryview) -> None:
        """Fill `block`, aligned as for `write_at`. Raises UnreadableError if the blob ends before that."""


class BlobStore(Protocol):
    """Opens existing blobs by name, to read and write them in place.

    Every method raises MegatrainError naming the blob: UnreadableError if it cannot be read, DiskFullError if the disk
    is full.
    """

    def update(self, name: str) -> AbstractAsyncContextManager[Blob]:
        """Return a context that opens a blob once, for many transfers. Nothing of it is made durable."""

    def describe(self, name: str) -> str:
        """Return where a blob is, for messages."""


class SaveStore(Protocol):
    """Creates blobs by name, and reads them. Raises as BlobStore."""

    def create(self, name: str) -> AbstractAsyncContextManager[BlobWriter]:
        """Return a context that makes or replaces a blob, which is durable if the context ends without an error."""

    async def read_into(self, name: str, offset: int, block: memoryview) -> None:
        """Fill `block`, aligned as for `write_at`. Raises UnreadableError if the blob ends before that."""

    def size(self, name: str) -> int:
        """Return the size of a blob in bytes."""

    def describe(self, name: str) -> str:
        """Return where a blob is, for messages."""


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def aligned_block(nbytes: int) -> memoryview:
    """Return `aligned(nbytes)` zeros at an address that is a multiple of ALIGN_BYTES. They take RAM when touched."""
    return memoryview(mmap.mmap(-1, max(ALIGN_BYTES, aligned(nbytes))))


async def run_together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at the same time. If one fails, the others are cancelled, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


class FileStore:
    """Stores blobs as files of one folder, bypassing the page cache (O_DIRECT) if the file system can."""

    def __init__(self, folder: Path, folder_fd: int | None = None) -> None:
        """Use `folder`, or the folder that the descriptor `folder_fd` means, whatever has taken its name since."""
        self._folder = folder
        self._folder_fd = folder_fd

    @staticmethod
    @contextmanager
    def to_write(folder: Path) -> Iterator[FileStore]:
        """Yield a store that creates blobs in this very folder. Raises MegatrainError if there is no such folder."""
        with explained("write", folder):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield FileStore(folder, fd)
        finally:
            os.close(fd)

    @asynccontextmanager
    async def create(self, name: str) -> AsyncIterator[BlobWriter]:
        async with self._opened("write", name, "wb") as fd:
            blob = OpenFile(self._where(name), fd, fixed_size=False)
            yield blob
            await blob.sync()

    @asynccontextmanager
    async def update(self, name: str) -> AsyncIterator[Blob]:
        async with self._opened("read", name, "rb+") as fd:
            yield OpenFile(self._where(name), fd)

    async def read_into(self, name: str, offset: int, block: memoryview) -> None:
        async with self._opened("read", name, "rb") as fd:
            await OpenFile(self._where(name), fd).read_into(offset, block)

    def size(self, name: str) -> int:
        with explained("read", self._where(name)):
            return (self._folder / name).stat().st_size

    def describe(self, name: str) -> str:
        return str(self._folder / name)

    def _where(self, name: str) -> Path:
        return Path(self.describe(name))

    @asynccontextmanager
    async def _opened(self, action: str, name: str, mode: Literal["wb", "rb", "rb+"]) -> AsyncIterator[int]:
        path = self._folder / name if self._folder_fd is None else name
        opener = partial(_open_direct, folder_fd=self._folder_fd)
        with explained(action, self._where(name)):
            file = await aiofiles.open(path, mode, buffering=0, opener=opener)
        try:
            yield file.fileno()
        finally:
            await file.close()


class OpenFile:
    """Reads and writes an open file."""

    def __init__(self, path: Path, fd: int, *, fixed_size: bool = True) -> None:
        self._path = path
        self._fd = fd
        self._fixed_bytes = os.fstat(fd).st_size if fixed_size else None

    async def write_at(self, offset: int, block: memoryview) -> None:
        end = offset + len(block)
        if self._fixed_bytes is not None and end > self._fixed_bytes:
            size = f"it has {self._fixed_bytes} bytes and keeps that size"
            raise MegatrainError(f"cannot write {self._path} up to byte {end}: {size}")
        with explained("write", self._path):
            await self._completed(self._write, offset, block)

    async def read_into(self, offset: int, block: memoryview) -> None:
        with explained("read", self._path):
            got = await self._completed(self._read, offset, block)
        if got < len(block):
            expected, found = offset + len(block), os.fstat(self._fd).st_size
            raise UnreadableError(f"{self._path} is truncated: expected at least {expected} bytes, got {found}")

    async def sync(self) -> None:
        with explained("write", self._path):
            await self._completed(os.fsync, self._fd)

    def _write(self, offset: int, block: memoryview) -> None:
        while block:
            written = _transfer(self._fd, partial(os.pwrite, self._fd, block, offset))
            block, offset = block[written:], offset + written

    def _read(self, offset: int, block: memoryview) -> int:
        """Return the number of bytes read. It is smaller than the block only at the end of the file."""
        total = 0
        while total < len(block):
            got = _transfer(self._fd, partial(os.preadv, self._fd, [block[total:]], offset + total))
            if not got:
                break
            total += got
        return total

    async def _completed(self, call: Callable[..., T], *arguments: object) -> T:
        """Run `call` in a thread, and return when it has ended, even if cancelled: the file is closed after this."""
        done = asyncio.get_running_loop().run_in_executor(None, partial(call, *arguments))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait([done])
            raise


def _transfer(fd: int, call: Callable[[], int]) -> int:
    """Run `call`, and once more through the page cache if the file system refuses it after all."""
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
