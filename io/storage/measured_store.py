"""Wraps a BlobStore to count the bytes that it moves, and to record when."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

from megatrain_ray.io.storage.blob_store import Blob, BlobStore, Block

MAX_TIMES = 4096  # kept at most; a step that waits for the disk has few of them


class Moved(NamedTuple):
    """Counts bytes read and written."""

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
    """Holds the start and end of a time, in seconds of CLOCK_MONOTONIC: one clock for all processes of a machine."""

    start_s: float
    end_s: float


class Busy(NamedTuple):
    """Lists the times in which at least one transfer was in flight, in order. Old ones may be missing.

    since_s: times that ended before this moment may be left out.
    """

    times: tuple[Time, ...] = ()
    since_s: float = 0.0


NEVER = Busy()


class DiskMeter:
    """Counts bytes read and written, and the times with at least one transfer in flight. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved = NOTHING
        self._times: deque[Time] = deque(maxlen=MAX_TIMES)
        self._left_out_s = 0.0  # end of the newest time that was dropped for lack of room
        self._under_way = 0
        self._since_s = 0.0  # when the current time with transfers in flight began

    @property
    def moved(self) -> Moved:
        """Return the bytes moved up to now by transfers that have ended."""
        with self._lock:
            return self._moved

    @property
    def busy(self) -> Busy:
        """Return the busy times up to now. The last one includes transfers in flight."""
        with self._lock:
            now = (Time(self._since_s, time.perf_counter()),) if self._under_way else ()
            return Busy((*self._times, *now), self._left_out_s)

    @contextmanager
    def transfer(self, num_bytes: Moved) -> Iterator[None]:
        """Measure the block as one transfer of so many bytes."""
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
    """Counts everything that moves through another store."""

    def __init__(self, store: BlobStore, meter: DiskMeter) -> None:
        self._store = store
        self._meter = meter

    @asynccontextmanager
    async def update(self, name: str) -> AsyncIterator[Blob]:
        async with self._store.update(name) as blob:
            yield _MeasuredBlob(blob, self._meter)

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
