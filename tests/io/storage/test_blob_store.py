"""One contract for every blob store, and what only files have: alignment, the page cache, a disk that fails."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.files.disk_errors import DiskFullError, UnreadableError
from megatrain_ray.io.storage import blob_store
from megatrain_ray.io.storage.blob_store import ALIGN_BYTES, FileStore, aligned, aligned_block
from megatrain_ray.io.storage.kvikio_store import KvikioFiles, unusable
from tests.support import fake_kvikio
from tests.support.memory_store import MemoryStore

SIZES = [0, 1, 4095, 4096, 4097, (3 << 20) + 1]


@pytest.fixture(params=["memory", "files", "files, buffered", "kvikio, imitated", "kvikio"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore | MemoryStore:
    if request.param.startswith("kvikio"):
        if request.param == "kvikio, imitated":
            fake_kvikio.install(monkeypatch)
        return kvikio_files(tmp_path)
    if request.param == "files, buffered":
        real_open = os.open

        def refuse_direct(path: str, flags: int, mode: int, dir_fd: int | None = None) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "this file system knows no O_DIRECT")
            return real_open(path, flags, mode, dir_fd=dir_fd)

        monkeypatch.setattr(os, "open", refuse_direct)
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path)


def kvikio_files(folder: Path) -> KvikioFiles:
    """Return a store over files of a folder, which otherwise are those of this process.

    Skips where kvikio does not work.
    """
    if reason := unusable(folder):
        pytest.skip(reason)
    store = KvikioFiles()
    store._folder = folder
    return store


def block_of(data: bytes) -> memoryview:
    block = aligned_block(len(data))
    block[: len(data)] = data
    return block[: aligned(len(data))]


def content(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(nbytes + seed).randbytes(nbytes)


async def write(store: FileStore, name: str, data: bytes) -> None:
    async with store.create(name) as blob:
        await blob.write_at(0, block_of(data))


async def read(store: FileStore, name: str, offset: int, nbytes: int) -> bytes:
    block = aligned_block(nbytes)[: aligned(nbytes)]
    await store.read_into(name, offset, block)
    return bytes(block[:nbytes])


@pytest.mark.parametrize("nbytes", SIZES)
async def test_what_was_written_is_read_from_any_block(store: FileStore, nbytes: int) -> None:
    data = content(nbytes)
    await write(store, "blob", data)
    assert store.size("blob") == aligned(nbytes)
    for offset in {0, *(n for n in (4096, 8192, 3 << 20) if n < nbytes)}:
        for size in {n for n in (*SIZES, nbytes - offset) if 0 <= n <= nbytes - offset}:
            assert await read(store, "blob", offset, size) == data[offset : offset + size]


async def test_blocks_may_come_in_any_order_and_at_the_same_time(store: FileStore) -> None:
    parts = [content(4096 * (1 + k % 3), k) for k in range(20)]
    offsets = [sum(map(len, parts[:k])) for k in range(20)]
    order = random.Random(0).sample(range(20), 20)
    async with store.create("blob") as blob:
        await asyncio.gather(*(blob.write_at(offsets[k], block_of(parts[k])) for k in order))
    whole = b"".join(parts)
    assert store.size("blob") == len(whole)
    assert await read(store, "blob", 0, len(whole)) == whole


async def test_a_second_write_replaces_the_first(store: FileStore) -> None:
    for data in (content(9000), content(4097), b""):
        await write(store, "blob", data)
        assert store.size("blob") == aligned(len(data))
        assert await read(store, "blob", 0, len(data)) == data


async def test_reading_past_the_end_is_an_error(store: FileStore) -> None:
    await write(store, "blob", content(8192))
    for offset, nbytes in ((0, 12288), (8192, 4096), (4096, 8192), (20480, 4096)):
        with pytest.raises(UnreadableError, match=rf"blob.* truncated: .* least {offset + nbytes} .* got 8192"):
            await read(store, "blob", offset, nbytes)


async def test_a_blob_that_is_not_there_is_named(store: FileStore) -> None:
    await write(store, "kept", b"kept")
    with pytest.raises(UnreadableError, match="gone"):
        store.size("gone")
    with pytest.raises(UnreadableError, match="gone"):
        await read(store, "gone", 0, 1)
    assert await read(store, "kept", 0, 4) == b"kept"


async def test_the_blocks_own_errors_pass_through(store: FileStore) -> None:
    with pytest.raises(LookupError, match="two"):
        async with store.create("blob") as blob:
            await blob.write_at(0, block_of(b"one"))
            raise LookupError("two")


async def test_a_blob_is_read_and_written_in_place(store: FileStore) -> None:
    before, parts = content(5 * 4096), [content(8192, 1), content(4096, 2)]
    await write(store, "blob", before)
    block = aligned_block(8192)
    async with store.update("blob") as blob:
        await blob.read_into(4096, block)
        assert bytes(block) == before[4096:12288]
        await asyncio.gather(blob.write_at(12288, block_of(parts[0])), blob.write_at(0, block_of(parts[1])))
        await blob.read_into(12288, block)
        assert bytes(block) == parts[0]
    assert store.size("blob") == len(before)
    assert await read(store, "blob", 0, len(before)) == parts[1] + before[4096:12288] + parts[0]


async def test_a_blob_in_place_keeps_its_size(store: FileStore) -> None:
    data = content(8192)
    await write(store, "blob", data)
    async with store.update("blob") as blob:
        for offset, nbytes in ((0, 12288), (8192, 4096), (4096, 8192), (20480, 4096)):
            with pytest.raises(MegatrainError, match=rf"cannot write .*blob.* to byte {offset + nbytes}: it has 8192"):
                await blob.write_at(offset, block_of(content(nbytes)))
            with pytest.raises(UnreadableError, match=rf"blob.* truncated: .* least {offset + nbytes} .* got 8192"):
                await blob.read_into(offset, aligned_block(nbytes))
    assert store.size("blob") == 8192
    assert await read(store, "blob", 0, 8192) == data


async def test_a_blob_that_is_not_there_cannot_be_updated(store: FileStore) -> None:
    with pytest.raises(UnreadableError, match="gone"):
        async with store.update("gone"):
            pytest.fail("there is no such blob")
    with pytest.raises(UnreadableError, match="gone"):
        store.size("gone")


async def test_two_transfers_of_a_blob_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other: one after the other they would never end."""
    await write(FileStore(tmp_path), "blob", content(8192))
    real_write, both, names = os.pwrite, threading.Barrier(2), list[str]()

    def pwrite(fd: int, part: memoryview, offset: int) -> int:
        names.append(threading.current_thread().name)
        both.wait(20)
        return real_write(fd, part, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = content(8192, 1)
    store = FileStore(tmp_path)
    async with store.update("blob") as blob:
        await asyncio.gather(*(blob.write_at(k, block_of(data[k : k + 4096])) for k in (0, 4096)))
    assert len(set(names)) == 2
    assert await read(store, "blob", 0, 8192) == data


async def test_a_blob_in_place_is_opened_once_and_never_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await write(FileStore(tmp_path), "blob", content(8192))
    real_open, opened = blob_store._open_direct, list[str]()

    def counted(path: str, flags: int, folder_fd: int | None = None) -> int:
        opened.append(path)
        return real_open(path, flags, folder_fd)

    monkeypatch.setattr(blob_store, "_open_direct", counted)
    monkeypatch.setattr(os, "fsync", lambda fd: pytest.fail("synced"))
    async with FileStore(tmp_path).update("blob") as blob:
        for offset in (0, 4096):
            await blob.write_at(offset, block_of(content(4096, offset)))
            await blob.read_into(offset, aligned_block(4096))
    assert opened == [str(tmp_path / "blob")]


async def test_every_transfer_is_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not would end direct transfers of that file, silently."""
    with open_direct(tmp_path / "probe") as fd:
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            pytest.skip("the temporary folder's file system knows no O_DIRECT")
    monkeypatch.setattr(fcntl, "fcntl", lambda *_: pytest.fail("a transfer was refused"))
    data = content(3 * ALIGN_BYTES + 1)
    await write(FileStore(tmp_path), "blob", data)
    assert await read(FileStore(tmp_path), "blob", ALIGN_BYTES, len(data) - ALIGN_BYTES) == data[ALIGN_BYTES:]
    async with FileStore(tmp_path).update("blob") as blob:
        await blob.write_at(ALIGN_BYTES, block_of(data[:ALIGN_BYTES]))
        await blob.read_into(0, aligned_block(2 * ALIGN_BYTES))


@contextmanager
def open_direct(path: Path) -> Iterator[int]:
    fd = blob_store._open_direct(str(path), os.O_WRONLY | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)


async def test_a_file_system_that_refuses_only_the_transfer_and_writes_little_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, refused = os.pwrite, list[int]()

    def pwrite(fd: int, part: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(part))
            raise OSError(errno.EINVAL, "alignment")
        return real_write(fd, part[:1000], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = content(8192)
    await write(FileStore(tmp_path), "blob", data)
    assert (tmp_path / "blob").read_bytes() == data
    assert refused in ([], [8192]), "from then on through the page cache"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_no_room_is_an_error_that_says_where_and_how_much_there_is(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, part: memoryview, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", full)
    message = rf"cannot write {tmp_path}/blob: {os.strerror(number)}, [0-9.]+ .?i?B are free there"
    with pytest.raises(DiskFullError, match=message):
        await write(FileStore(tmp_path), "blob", content(5000))


async def test_a_full_device_and_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "blob").symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match=rf"cannot write {tmp_path}/blob: No space left on device"):
        await write(FileStore(tmp_path), "blob", content(5000))
    with pytest.raises(MegatrainError, match=r"cannot write .*no_folder/blob: No such file"):
        await write(FileStore(tmp_path / "no_folder"), "blob", b"")


async def test_what_lacks_in_this_process_says_nothing_about_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(FileStore(tmp_path), "blob", b"good")

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(MegatrainError, match="Too many open files") as caught:
        await read(FileStore(tmp_path), "blob", 0, 4)
    assert not isinstance(caught.value, UnreadableError)


async def test_a_cancelled_write_is_through_before_its_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it could go to the file that gets the descriptor's number next."""
    started, go_on, events = threading.Event(), threading.Event(), list[str]()

    def pwrite(fd: int, part: memoryview, offset: int) -> int:
        started.set()
        assert go_on.wait(20)
        events.append(f"written to {Path(f'/proc/self/fd/{fd}').readlink().name}")
        return len(part)

    monkeypatch.setattr(os, "pwrite", pwrite)
    writing = asyncio.create_task(write(FileStore(tmp_path), "blob", b"late"))
    await asyncio.to_thread(started.wait)
    writing.cancel()
    asyncio.get_running_loop().call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert events == ["written to blob"]
