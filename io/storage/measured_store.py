"""Wraps a BlobStore to count the bytes that it moves, and to record when."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import numpy as np

from megatrain_ray.io.storage.blob_store import Blob, BlobStore

MAX_TIMES = 4096  # kept at most; a step that waits for the disk has few of them

# The counters of a meter: bytes read and written, and the newest busy times, start and end in seconds. The end of a
# time that goes on is infinite.
METER = np.dtype([("moved", "i8", 2), ("busy", "f8", (MAX_TIMES, 2))])


class IoBytes(NamedTuple):
    """Counts bytes read and written."""

    read: int = 0
    written: int = 0


class BusyInterval(NamedTuple):
    """Holds the start and end of a time, in seconds of CLOCK_MONOTONIC: one clock for all processes of a machine."""

    start_s: float
    end_s: float


class DiskMeter:
    """Counts bytes read and written, and the times with at least one transfer in flight. Thread-safe."""

    def __init__(self, counters: np.void | None = None) -> None:
        """Go on counting where the bytes in `counters` stand, and forget the times in it.

        counters: of type METER, in memory that other processes read; None: nobody does.
        """
        counters = np.zeros(1, METER)[0] if counters is None else counters
        self._moved, self._busy = counters["moved"], counters["busy"]
        self._busy[:] = 0.0  # a predecessor that was killed may have left a time that goes on
        self._lock = threading.Lock()
        self._under_way = 0
        self._num_times = 0

    @property
    def moved(self) -> IoBytes:
        """Return the bytes moved up to now by transfers that have ended."""
        with self._lock:
            return IoBytes(*self._moved.tolist())

    @property
    def busy(self) -> list[BusyInterval]:
        """Return the newest busy times, oldest first."""
        return [BusyInterval(*time) for time in sorted(self._busy.tolist()) if time[1]]

    @contextmanager
    def transfer(self, num_bytes: IoBytes) -> Iterator[None]:
        """Measure the block as one transfer of so many bytes."""
        with self._lock:
            if not self._under_way:
                self._busy[self._num_times % MAX_TIMES] = time.perf_counter(), np.inf
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._moved += num_bytes
                if not self._under_way:
                    self._busy[self._num_times % MAX_TIMES, 1] = time.perf_counter()
                    self._num_times += 1


def busy_s(busy: np.ndarray[Any, np.dtype[np.float64]], within: BusyInterval) -> float:
    """Return for how many seconds of a time at least one of several meters had a transfer in flight.

    busy: the counter of that name of each meter, [meters, MAX_TIMES, 2].
    """
    spans = busy[busy[..., 1] > within.start_s].clip(*within)
    spans = spans[spans[:, 0].argsort()]
    reached = np.maximum.accumulate([within.start_s, *spans[:, 1]])  # by this span and those before it
    return float((reached[1:] - np.maximum(spans[:, 0], reached[:-1])).clip(0.0).sum())


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

    async def read_into(self, offset: int, block: memoryview) -> None:
        with self._meter.transfer(IoBytes(read=len(block))):
            await self._blob.read_into(offset, block)

    async def write_at(self, offset: int, block: memoryview) -> None:
        with self._meter.transfer(IoBytes(written=len(block))):
            await self._blob.write_at(offset, block)
