"""One contract for every blob store, and what only files have: alignment, the page cache, a disk that fails."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io import blob_store
from megatrain_ray.io.blob_store import BLOCK_BYTES, BlobStore, FileStore, MemoryStore

SIZES = [0, 1, 4095, 4096, 4097, (3 << 20) + 1]


@pytest.fixture(params=["memory", "files", "files, buffered"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BlobStore:
    if request.param == "files, buffered":
        real_open = os.open

        def refuse_direct(path: str, flags: int, mode: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "this file system knows no O_DIRECT")
            return real_open(path, flags, mode)

        monkeypatch.setattr(os, "open", refuse_direct)
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path)


def content(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def in_chunks(data: bytes, nbytes: int) -> Iterator[memoryview]:
    return (memoryview(data)[start : start + nbytes] for start in range(0, len(data), nbytes))


async def read(store: BlobStore, name: str, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    await store.read_into(name, offset, memoryview(buffer))
    return bytes(buffer)


@pytest.mark.parametrize("nbytes", [*SIZES, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 4097])
async def test_what_was_written_is_read_from_any_offset(store: BlobStore, nbytes: int) -> None:
    data = content(nbytes)
    for chunk in {max(1, nbytes), 1 << 20, 5 << 20, 65537}:
        assert await store.write("blob", in_chunks(data, chunk)) == nbytes
        assert await store.size("blob") == nbytes
        assert await read(store, "blob", 0, nbytes) == data
    for offset in {n for size in SIZES for n in (size, nbytes - size) if 0 <= n < nbytes}:
        for part in {n for n in (*SIZES, nbytes - offset) if offset + n <= nbytes}:
            assert await read(store, "blob", offset, part) == data[offset : offset + part]


async def test_a_second_write_replaces_the_first(store: BlobStore) -> None:
    for data in (content(9000), content(4097), b""):
        await store.write("blob", iter([memoryview(data)]))
        assert await read(store, "blob", 0, await store.size("blob")) == data


@pytest.mark.parametrize("nbytes", SIZES)
async def test_reading_past_the_end_is_an_error(store: BlobStore, nbytes: int) -> None:
    await store.write("blob", in_chunks(content(nbytes), 1 << 20))
    for offset, part in ((0, nbytes + 1), (nbytes, 1), (nbytes + 5000, 1)):
        with pytest.raises(MegatrainError, match=rf"blob.* truncated: .* least {offset + part} .* got {nbytes}"):
            await read(store, "blob", offset, part)


async def test_a_blob_that_is_not_there_is_named(store: BlobStore) -> None:
    await store.write("kept", iter([memoryview(b"kept")]))
    with pytest.raises(MegatrainError, match="gone"):
        await store.size("gone")
    with pytest.raises(MegatrainError, match="gone"):
        await read(store, "gone", 0, 1)
    assert await read(store, "kept", 0, 4) == b"kept"


async def test_the_chunks_own_errors_pass_through(store: BlobStore) -> None:
    def chunks() -> Iterator[memoryview]:
        yield memoryview(b"one")
        raise LookupError("two")

    with pytest.raises(LookupError, match="two"):
        await store.write("blob", chunks())


async def test_every_transfer_is_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not would end direct transfers of that file, silently."""
    with open_direct(tmp_path / "probe") as fd:
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            pytest.skip("the temporary folder's file system knows no O_DIRECT")
    monkeypatch.setattr(fcntl, "fcntl", lambda *_: pytest.fail("a transfer was refused"))
    data = content(BLOCK_BYTES + 4097)
    await FileStore(tmp_path).write("blob", in_chunks(data, 65537))
    assert await read(FileStore(tmp_path), "blob", 4095, BLOCK_BYTES + 2) == data[4095:]


@contextmanager
def open_direct(path: Path) -> Iterator[int]:
    fd = blob_store._open_direct(str(path), os.O_WRONLY | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)


async def test_a_file_system_that_refuses_only_the_transfer(tmp_path: Path) -> None:
    data, refused = content(9000), list[int]()

    async def write(part: memoryview) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(part))
            raise OSError(errno.EINVAL, "alignment")
        return os.write(fd, part)

    with open_direct(tmp_path / "blob") as fd:
        assert await blob_store._transfer(fd, write, memoryview(data)) == len(data)
        assert await blob_store._transfer(fd, write, memoryview(b"more")) == 4
    assert refused == [9000], "from then on through the page cache"
    assert (tmp_path / "blob").read_bytes() == data + b"more"


async def test_a_full_disk_is_an_error_that_says_where(tmp_path: Path) -> None:
    (tmp_path / "blob").symlink_to("/dev/full")
    with pytest.raises(MegatrainError, match=rf"cannot write {tmp_path}/blob: No space left on device"):
        await FileStore(tmp_path).write("blob", in_chunks(content(5000), 5000))
    with pytest.raises(MegatrainError, match=r"cannot write .*no_folder/blob: No such file"):
        await FileStore(tmp_path / "no_folder").write("blob", iter([]))
