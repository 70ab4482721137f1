"""A blob store in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.files.disk_errors import UnreadableError
from megatrain_ray.io.storage.blob_store import Blob, BlobWriter


class MemoryStore:
    """Stores blobs in this process's memory."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytearray] = {}

    @asynccontextmanager
    async def create(self, name: str) -> AsyncIterator[BlobWriter]:
        blob = self._blobs[name] = bytearray()
        yield _MemoryBlob(blob)

    @asynccontextmanager
    async def update(self, name: str) -> AsyncIterator[Blob]:
        yield _MemoryInPlace(self.describe(name), self._blob(name))

    async def read_into(self, name: str, offset: int, block: memoryview) -> None:
        await _MemoryInPlace(self.describe(name), self._blob(name)).read_into(offset, block)

    def size(self, name: str) -> int:
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


class _MemoryInPlace(_MemoryBlob):
    def __init__(self, where: str, blob: bytearray) -> None:
        super().__init__(blob)
        self._where = where

    async def write_at(self, offset: int, block: memoryview) -> None:
        if (end := offset + len(block)) > len(self._blob):
            raise MegatrainError(f"cannot write {self._where} up to byte {end}: it has {len(self._blob)} bytes")
        await super().write_at(offset, block)

    async def read_into(self, offset: int, block: memoryview) -> None:
        part = self._blob[offset : offset + len(block)]
        if len(part) < len(block):
            end = offset + len(block)
            raise UnreadableError(f"{self._where} is truncated: expected at least {end} bytes, got {len(self._blob)}")
        block[:] = part
