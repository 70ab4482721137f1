"""Blobs: named byte strings written whole and read in parts, in memory or in files."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import aiofiles

from megatrain_ray.errors import MegatrainError

BLOCK_BYTES = 4 << 20
DIRECT_ALIGN = 4096  # of O_DIRECT: file offset, size and address


class BlobStore(Protocol):
    """Every method raises MegatrainError naming the blob. Calls for different blobs may run at the same time."""

    async def write(self, name: str, chunks: Iterable[memoryview]) -> int:
        """Writes a new blob, or another one in its place, and returns its bytes; durable on return.

        `chunks` is iterated in a worker thread, so it may compute. What a failed write leaves is not to be used.
        """

    async def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer`, writable bytes. Raises MegatrainError when the blob ends before."""

    async def size(self, name: str) -> int:
        """Bytes of a blob."""

    def describe(self, name: str) -> str:
        """Where a blob is, for messages."""


class MemoryStore:
    """Blobs in this process's memory."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    async def write(self, name: str, chunks: Iterable[memoryview]) -> int:
        self._blobs[name] = await asyncio.to_thread(b"".join, chunks)
        return len(self._blobs[name])

    async def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        part = self._blob(name)[offset : offset + len(buffer)]
        if len(part) < len(buffer):
            raise _too_short(self.describe(name), offset + len(buffer), len(self._blob(name)))
        buffer[:] = part

    async def size(self, name: str) -> int:
        return len(self._blob(name))

    def describe(self, name: str) -> str:
        return f"{name} in memory"

    def _blob(self, name: str) -> bytes:
        if name not in self._blobs:
            raise MegatrainError(f"cannot read {self.describe(name)}: there is no such blob")
        return self._blobs[name]


class FileStore:
    """Blobs as files of one folder, past the page cache (O_DIRECT) where the file system can."""

    def __init__(self, folder: Path) -> None:
        """`folder` exists."""
        self._folder = folder

    async def write(self, name: str, chunks: Iterable[memoryview]) -> int:
        path, block, total = self._folder / name, memoryview(mmap.mmap(-1, BLOCK_BYTES)), 0
        filled = _fill(chunks, block)
        with _explained("write", path):
            async with aiofiles.open(path, "wb", buffering=0, opener=_open_direct) as file:
                while nbytes := await asyncio.to_thread(next, filled, 0):
                    total += nbytes
                    left = block[: _aligned(nbytes)]
                    while left:
                        left = left[await _transfer(file.fileno(), file.write, left) :]
                await file.truncate(total)  # the last block was written up to the alignment
                await asyncio.to_thread(os.fsync, file.fileno())
        return total

    async def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        path, block = self._folder / name, memoryview(mmap.mmap(-1, BLOCK_BYTES))
        with _explained("read", path):
            async with aiofiles.open(path, "rb", buffering=0, opener=_open_direct) as file:
                while buffer:
                    skip = offset % DIRECT_ALIGN
                    await file.seek(offset - skip)
                    window = block[: _aligned(skip + len(buffer))]
                    end = await _transfer(file.fileno(), file.readinto, window)
                    if end <= skip:
                        raise _too_short(str(path), offset + len(buffer), path.stat().st_size)
                    part = window[skip : min(end, skip + len(buffer))]
                    buffer[: len(part)] = part
                    buffer, offset = buffer[len(part) :], offset + len(part)

    async def size(self, name: str) -> int:
        with _explained("read", self._folder / name):
            return (self._folder / name).stat().st_size

    def describe(self, name: str) -> str:
        return str(self._folder / name)


def _fill(chunks: Iterable[memoryview], block: memoryview) -> Iterator[int]:
    """Copies the chunks into `block` as often as it gets full, and what is left at the end; yields bytes filled."""
    filled = 0
    for chunk in chunks:
        rest = chunk
        while rest:
            part = rest[: len(block) - filled]
            block[filled : filled + len(part)] = part
            rest, filled = rest[len(part) :], filled + len(part)
            if filled == len(block):
                yield filled
                filled = 0
    if filled:
        yield filled


def _open_direct(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // DIRECT_ALIGN) * DIRECT_ALIGN


async def _transfer(fd: int, call: Callable[[memoryview], Awaitable[int | None]], data: memoryview) -> int:
    """Some file systems open a file for O_DIRECT and then refuse the transfer: once more through the page cache."""
    try:
        return await call(data) or 0
    except OSError as error:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return await call(data) or 0


@contextmanager
def _explained(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MegatrainError(f"cannot {action} {path}: {error.strerror}") from error


def _too_short(where: str, expected: int, got: int) -> MegatrainError:
    return MegatrainError(f"{where} is truncated: expected at least {expected} bytes, got {got}")
