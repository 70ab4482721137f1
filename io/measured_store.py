"""A BlobStore that counts what one opened blob moves, and how long."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from megatrain_ray.io.blob_store import Blob, BlobStore, BlobWriter


class DiskMeter:
    """Bytes read and written, and the seconds in which at least one transfer was under way. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._busy_s = 0.0
        self._under_way = 0
        self._since_s = 0.0  # when the first of those under way began

    def read(self) -> tuple[int, float]:
        """Bytes that have been moved and the seconds that took, up to now."""
        with self._lock:
            open_s = time.perf_counter() - self._since_s if self._under_way else 0.0
            return self._num_bytes, self._busy_s + open_s

    @contextmanager
    def transfer(self, num_bytes: int) -> Iterator[None]:
        """The block moves so many."""
        with self._lock:
            if not self._under_way:
                self._since_s = time.perf_counter()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._num_bytes += num_bytes
                if not self._under_way:
                    self._busy_s += time.perf_counter() - self._since_s


class MeasuredStore:
    """Another store, of which everything that moves through `update` and `read_into` is counted."""

    def __init__(self, store: BlobStore, meter: DiskMeter) -> None:
        self._store = store
        self._meter = meter

    def create(self, name: str) -> AbstractAsyncContextManager[BlobWriter]:
        return self._store.create(name)

    @asynccontextmanager
    async def update(self, name: str) -> AsyncIterator[Blob]:
        async with self._store.update(name) as blob:
            yield _MeasuredBlob(blob, self._meter)

    async def read_into(self, name: str, offset: int, block: memoryview) -> None:
        with self._meter.transfer(len(block)):
            await self._store.read_into(name, offset, block)

    async def size(self, name: str) -> int:
        return await self._store.size(name)

    def describe(self, name: str) -> str:
        return self._store.describe(name)


class _MeasuredBlob:
    def __init__(self, blob: Blob, meter: DiskMeter) -> None:
        self._blob = blob
        self._meter = meter

    async def read_into(self, offset: int, block: memoryview) -> None:
        with self._meter.transfer(len(block)):
            await self._blob.read_into(offset, block)

    async def write_at(self, offset: int, block: memoryview) -> None:
        with self._meter.transfer(len(block)):
            await self._blob.write_at(offset, block)
