"""What is written and read when a disk is measured, that nothing of it stays, and that a slow disk ends it early."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.files.disk_errors import DiskFullError
from megatrain_ray.io.storage import disk_rate
from megatrain_ray.io.storage.blob_store import Blob
from megatrain_ray.io.storage.disk_io import DiskIo, DiskWay, HeldFiles
from megatrain_ray.io.storage.disk_rate import BLOCK_BYTES, IN_FLIGHT, measure_mixed

Call = tuple[str, int]


@dataclass
class Spy:
    """Keeps the block of each transfer of a store, in the order in which transfers begin.

    entries: what the folder held at each transfer.
    fail_on: a write that finds the disk full.
    """

    folder: Path
    calls: list[Call] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)
    num_zeros: int = 0
    fail_on: Call | None = None

    def files(self, io: DiskIo) -> HeldFiles:
        assert io is DiskIo.POSIX
        return _SpiedStore(self)

    def note(self, kind: str, offset: int) -> None:
        self.calls.append((kind, offset // BLOCK_BYTES))
        self.entries += os.listdir(self.folder)  # noqa: PTH208, names
        if self.calls[-1] == self.fail_on:
            raise OSError(errno.ENOSPC, "No space left on device")


class _SpiedStore(HeldFiles):
    def __init__(self, spy: Spy) -> None:
        super().__init__()
        self._spy = spy

    @asynccontextmanager
    async def update(self, name: str) -> AsyncIterator[Blob]:
        async with super().update(name) as blob:
            yield _SpiedBlob(self._spy, blob)


class _SpiedBlob:
    def __init__(self, spy: Spy, blob: Blob) -> None:
        self._spy = spy
        self._blob = blob

    async def write_at(self, offset: int, block: memoryview) -> None:
        self._spy.note("write", offset)
        await self._blob.write_at(offset, block)

    async def read_into(self, offset: int, block: memoryview) -> None:
        self._spy.note("read", offset)
        await self._blob.read_into(offset, block)
        self._spy.num_zeros += bytes(block[:4096]).count(0) > 64


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy(tmp_path)
    monkeypatch.setattr(disk_rate, "held_files", spy.files)
    return spy


def test_as_much_is_read_as_written_in_a_file_without_a_name(tmp_path: Path, spy: Spy) -> None:
    """After the file was filled, and in blocks of it that differ."""
    assert measure_mixed(tmp_path, 5 * BLOCK_BYTES + 1) > 0
    fill, mixed = spy.calls[:6], spy.calls[6:]
    assert fill == [("write", k) for k in range(6)]
    assert mixed[:2 * IN_FLIGHT] == [
        *(("read", k) for k in range(IN_FLIGHT)), *(("write", k) for k in (3, 4, 5, 0)),
    ]  # fmt: skip
    assert sorted(mixed) == sorted((kind, k) for kind in ("read", "write") for k in range(6))
    assert spy.num_zeros == 0
    assert spy.entries == []


def test_what_is_packed_counts_whole_and_less_of_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of five blocks: the fifth is residuals. The rate is of what a step moves."""
    written: list[int] = []
    real_write = os.pwrite

    def pwrite(fd: int, part: memoryview, offset: int) -> int:
        written.append(len(part))
        return real_write(fd, part, offset)

    clock = iter(range(100, 1000))
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(disk_rate, "FILL_S", math.inf)
    monkeypatch.setattr(disk_rate, "MIXED_S", math.inf)
    monkeypatch.setattr(disk_rate.time, "monotonic", lambda: float(next(clock)))
    rate = measure_mixed(tmp_path, 5 * BLOCK_BYTES, DiskWay(packed=True))
    seconds = (2 * 5 * BLOCK_BYTES) / rate
    assert seconds == pytest.approx(round(seconds))  # of this clock: all bytes were counted
    assert len(written) == 10
    assert sorted(written)[-2:] == [BLOCK_BYTES] * 2
    assert all(1.15 < BLOCK_BYTES / size < 1.2 for size in sorted(written)[:-2])


def test_a_slow_disk_ends_it_early(tmp_path: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes longer than there is time: nothing is begun after the first block of each."""
    monkeypatch.setattr(disk_rate, "FILL_S", 0.0)
    monkeypatch.setattr(disk_rate, "MIXED_S", 0.0)
    assert measure_mixed(tmp_path, 1 << 40) > 0
    assert spy.calls == [("write", 0), ("read", 0), ("write", 0)]


def test_a_file_that_was_not_filled_in_time_is_gone_over_again(
    tmp_path: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_rate, "FILL_S", 0.0)
    monkeypatch.setattr(disk_rate, "MIXED_S", math.inf)
    assert measure_mixed(tmp_path, 3 * BLOCK_BYTES) > 0
    assert sorted(spy.calls) == [("read", 0)] * 3 + [("write", 0)] * 4


def test_a_disk_that_fails_is_one_error_and_nothing_stays(tmp_path: Path, spy: Spy) -> None:
    spy.fail_on = ("write", 1)
    with pytest.raises(DiskFullError, match=rf"cannot write {tmp_path}: No space left on device, "):
        measure_mixed(tmp_path, 2 * BLOCK_BYTES)
    with pytest.raises(MegatrainError, match=f"cannot write {tmp_path / 'none'}: No such file"):
        measure_mixed(tmp_path / "none", 1)
    assert list(tmp_path.iterdir()) == []
