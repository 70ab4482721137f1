"""kvikio differs from our own threads in when it cannot be used, and what it says then.

The rest is in test_blob_store.py.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.files.disk_errors import DiskError, DiskFullError, UnreadableError
from megatrain_ray.io.storage.blob_store import aligned_block
from megatrain_ray.io.storage.disk_io import DiskIo, DiskWay, create_spill_file, held_files
from megatrain_ray.io.storage.disk_rate import BLOCK_BYTES, measure_mixed
from megatrain_ray.io.storage.kvikio_store import SETTINGS, KvikioFiles, unusable
from tests.support import fake_kvikio
from tests.support.fake_kvikio import CuFile, IOFuture

NBYTES = 8192


def raising(number: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


async def write_and_read(fd: int) -> bytes:
    values, found = aligned_block(NBYTES), aligned_block(NBYTES)
    values[:] = bytes(range(256)) * (NBYTES // 256)
    async with held_files(DiskIo.KVIKIO).update(str(fd)) as blob:
        await blob.write_at(0, values)
        await blob.read_into(0, found)
    return bytes(found)


@pytest.fixture
def fd(tmp_path: Path) -> int:
    return create_spill_file(tmp_path, "spill", NBYTES)


async def test_a_file_without_a_name_is_updated_past_the_page_cache(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = fake_kvikio.install(monkeypatch)
    assert await write_and_read(fd) == bytes(range(256)) * (NBYTES // 256)
    assert settings == SETTINGS
    os.close(fd)


@pytest.mark.parametrize(
    ("call", "number", "error", "message"),
    [
        ("pwrite", errno.ENOSPC, DiskFullError, "cannot write .*: kvikio: .*: No space left on device, .* are free"),
        ("pwrite", errno.EPERM, DiskError, "cannot write .*: kvikio: .* on pwrite: Operation not permitted$"),
        ("preadv", errno.EIO, UnreadableError, "cannot read .*: kvikio: .* on pread: Input/output error$"),
    ],
)
async def test_what_goes_wrong_is_told_as_of_any_file(
    fd: int, monkeypatch: pytest.MonkeyPatch, call: str, number: int, error: type[Exception], message: str
) -> None:
    fake_kvikio.install(monkeypatch)
    monkeypatch.setattr(os, call, raising(number))
    with pytest.raises(MegatrainError, match=message) as caught:
        await write_and_read(fd)
    assert type(caught.value) is error
    os.close(fd)


async def test_a_block_that_is_not_written_whole_is_an_error(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kvikio.install(monkeypatch)
    monkeypatch.setattr(os, "pwrite", lambda fd, part, offset: 4096)
    with pytest.raises(MegatrainError, match=r"cannot write .*: kvikio wrote 4096 of 8192 bytes"):
        await write_and_read(fd)
    os.close(fd)


async def test_a_cancelled_write_is_through_before_its_file_is_closed(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kvikio.install(monkeypatch)
    started, go_on, events = threading.Event(), threading.Event(), list[str]()

    class Slow(CuFile):
        def pwrite(self, buf: memoryview, size: int | None = None, file_offset: int = 0) -> IOFuture:
            started.set()
            assert go_on.wait(20)
            events.append("written")
            return super().pwrite(buf, size, file_offset)

        def close(self) -> None:
            events.append("closed")
            super().close()

    monkeypatch.setattr(sys.modules["kvikio"], "CuFile", Slow)
    writing = asyncio.create_task(write_and_read(fd))
    await asyncio.to_thread(started.wait)
    writing.cancel()
    asyncio.get_running_loop().call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert events == ["written", "closed"]
    os.close(fd)


def test_it_is_tried_in_the_very_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kvikio.install(monkeypatch)
    assert unusable(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert "No such file" in str(unusable(tmp_path / "none"))


def test_why_it_cannot_be_used_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert str(unusable(tmp_path)).startswith("kvikio cannot be used: ")
    with pytest.raises(MegatrainError, match="kvikio cannot be used"):
        held_files(DiskIo.KVIKIO)
    fake_kvikio.install(monkeypatch)

    def too_old(settings: dict[str, Any]) -> None:
        raise ValueError("unknown setting\n auto_direct_io_read")

    monkeypatch.setattr(sys.modules["kvikio.defaults"], "set", too_old)
    assert unusable(tmp_path) == "kvikio cannot be used: unknown setting auto_direct_io_read"


def test_what_fails_at_the_first_transfer_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvikio fails like this without CUDA's driver."""
    fake_kvikio.install(monkeypatch)

    def no_driver(*_: object, **__: object) -> IOFuture:
        raise RuntimeError("libcuda.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(CuFile, "pwrite", no_driver)
    assert "libcuda.so.1: cannot open shared object file" in str(unusable(tmp_path))
    monkeypatch.undo()


def test_what_reads_something_else_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kvikio.install(monkeypatch)
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: len(parts[0]))
    assert str(unusable(tmp_path)).startswith("kvikio read something else than it wrote to ")


def test_its_rate_is_measured_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kvikio.install(monkeypatch)
    opened = list[int]()
    real_update = KvikioFiles.update

    def update(self: KvikioFiles, name: str) -> Any:
        opened.append(int(name))
        return real_update(self, name)

    monkeypatch.setattr(KvikioFiles, "update", update)
    assert measure_mixed(tmp_path, BLOCK_BYTES, DiskWay(DiskIo.KVIKIO)) > 0
    assert measure_mixed(tmp_path, BLOCK_BYTES) > 0
    assert len(opened) == 1
