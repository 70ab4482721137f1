"""A BlobStore that counts what one opened blob moves, and when."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import NamedTuple

from megatrain_ray.io.storage.blob_store import Blob, BlobStore, BlobWriter, Block

MAX_TIMES = 4096  # that are kept; a disk that a step waits for has few of them in a step


class Moved(NamedTuple):
    """Bytes read and written."""

    read: int = 0
    written: int = 0

    @property
    def total(self) -> int:
        return self.read + self.written

    def since(self, before: Moved) -> Moved:
        return Moved(self.read - before.read, self.written - before.written)

    def plus(self, more: Moved) -> Moved:
        return Moved(self.read + more.read, self.written + more.written)


NOTHING = Moved()


class Time(NamedTuple):
    """From one moment to another, in seconds of CLOCK_MONOTONIC, which is one clock for all processes of a machine."""

    start_s: float
    end_s: float


class Busy(NamedTuple):
    """When at least one transfer was under way: the newest of these times, in their order. `since_s`: what ended before
    may be left out."""

    times: tuple[Time, ...] = ()
    since_s: float = 0.0


NEVER = Busy()


class DiskMeter:
    """Bytes read and written, and the times in which at least one transfer was under way. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved = NOTHING
        self._times: deque[Time] = deque(maxlen=MAX_TIMES)
        self._left_out_s = 0.0  # the end of the newest time that there is no room for any more
        self._under_way = 0
        self._since_s = 0.0  # when the first of those under way began

    @property
    def moved(self) -> Moved:
        """Up to now, by transfers that have ended."""
        with self._lock:
            return self._moved

    @property
    def busy(self) -> Busy:
        """Up to now, with what is under way."""
        with self._lock:
            now = (Time(self._since_s, time.perf_counter()),) if self._under_way else ()
            return Busy((*self._times, *now), self._left_out_s)

    @contextmanager
    def transfer(self, num_bytes: Moved) -> Iterator[None]:
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
                self._moved = self._moved.plus(num_bytes)
                if not self._under_way:
                    self._keep(Time(self._since_s, time.perf_counter()))

    def _keep(self, newest: Time) -> None:
        if len(self._times) == MAX_TIMES:
            self._left_out_s = self._times[0].end_s
        self._times.append(newest)


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
        with self._meter.transfer(Moved(read=len(block))):
            await self._store.read_into(name, offset, block)

    async def size(self, name: str) -> int:
        return await self._store.size(name)

    def describe(self, name: str) -> str:
        return self._store.describe(name)


class _MeasuredBlob:
    def __init__(self, blob: Blob, meter: DiskMeter) -> None:
        self._blob = blob
        self._meter = meter

    async def read_into(self, offset: int, block: Block) -> None:
        with self._meter.transfer(Moved(read=len(block))):
            await self._blob.read_into(offset, block)

    async def write_at(self, offset: int, block: Block) -> None:
        with self._meter.transfer(Moved(written=len(block))):
            await self._blob.write_at(offset, block)
