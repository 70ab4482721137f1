"""A store that counts bytes and the time in which some of them were under way."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import pytest

from megatrain_ray.io.storage import measured_store
from megatrain_ray.io.storage.blob_store import aligned_block
from megatrain_ray.io.storage.measured_store import DiskMeter, IoBytes, MeasuredStore
from tests.support.memory_store import MemoryStore


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds that a test sets."""
    now = [0.0]
    monkeypatch.setattr(measured_store.time, "perf_counter", lambda: now[0])
    yield now


def test_transfers_at_the_same_time_count_once(clock: list[float]) -> None:
    meter = DiskMeter()
    first, second = meter.transfer(IoBytes(read=100)), meter.transfer(IoBytes(written=20))
    with first:
        clock[0] = 1.0
        with second:
            clock[0] = 3.0
            assert (meter.moved, meter.busy) == ((0, 0), [(0.0, math.inf)])  # of what is under way, the time alone
        assert (meter.moved, meter.busy) == ((0, 20), [(0.0, math.inf)])
        clock[0] = 4.0
    clock[0] = 9.0
    assert (meter.moved, meter.busy) == ((100, 20), [(0.0, 4.0)])
    with pytest.raises(OSError), meter.transfer(IoBytes(read=1)):
        clock[0] = 10.0
        raise OSError
    assert (meter.moved, meter.busy) == ((101, 20), [(0.0, 4.0), (9.0, 10.0)])


def test_the_newest_times_are_kept(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_store, "MAX_TIMES", 2)
    meter = DiskMeter()
    for start in range(4):
        clock[0] = float(start)
        with meter.transfer(IoBytes(1, 0)):
            clock[0] += 0.5
    assert meter.busy == [(2.0, 2.5), (3.0, 3.5)]
    assert meter.moved == (4, 0)


def test_it_is_the_other_store_that_does_it() -> None:
    meter = DiskMeter()
    memory = MemoryStore()
    store = MeasuredStore(memory, meter)

    async def work() -> bytes:
        async with memory.create("x") as blob:
            await blob.write_at(0, aligned_block(8192))
        async with store.update("x") as blob:
            block = aligned_block(4096)
            block[:3] = b"abc"
            await blob.write_at(4096, block)
            await blob.read_into(4096, aligned_block(4096))
            into = aligned_block(4096)
            await blob.read_into(4096, into)
        return bytes(into[:3])

    assert asyncio.run(work()) == b"abc"
    assert meter.moved == (2 * 4096, 4096)
    assert store.describe("x") == "x in memory"
