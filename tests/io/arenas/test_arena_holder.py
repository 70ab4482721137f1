"""Holders of arenas and spill files: any of them may die but one."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.arenas.arena_holder import ArenaHandle, ArenaHolder
from megatrain_ray.io.files.disk_errors import DiskFullError
from megatrain_ray.io.storage.blob_store import ALIGN_BYTES, aligned_block
from megatrain_ray.io.storage.disk_io import DiskIo, SpillFile
from megatrain_ray.workers.arena_owner import ArenaOwner

SIZES = {"words": 64, "state-0": 5000}
NBYTES = 3 * ALIGN_BYTES


@contextmanager
def closing(*holders: ArenaHolder) -> Iterator[None]:
    try:
        yield
    finally:
        for holder in holders:
            holder.close()


def written(holder: ArenaHolder, name: str, value: int) -> None:
    arena = holder.map(name)
    torch.frombuffer(arena.buffer, dtype=torch.uint8)[0] = value
    arena.close()


def first_byte(holder: ArenaHolder, name: str) -> int:
    arena = holder.map(name)
    value = arena.buffer[0]
    arena.close()
    return value


def test_what_is_adopted_outlives_its_maker() -> None:
    owner = ArenaHolder.create(SIZES)
    written(owner, "words", 7)
    of_owner = owner.handles
    peer = ArenaHolder.adopt([of_owner])
    owner.close()
    second = ArenaHolder.adopt([of_owner, peer.handles])
    with closing(peer, second):
        assert first_byte(second, "words") == 7
        assert second.handles.keys() == SIZES.keys()
        assert {name: handle.nbytes for name, handle in second.handles.items()} == SIZES


def test_without_a_live_holder_all_are_named() -> None:
    owner = ArenaHolder.create(SIZES)
    handles = owner.handles
    owner.close()
    with pytest.raises(MegatrainError, match=r"cannot attach arena megatrain-[0-9a-f]{8}-words .*; cannot attach"):
        ArenaHolder.adopt([handles, handles])


def test_arenas_of_two_runs_are_never_mixed_up() -> None:
    """The descriptor of a closed arena is given out again, for the same arena of another run."""
    first = ArenaHolder.create(SIZES)
    stale = first.handles
    first.close()
    second = ArenaHolder.create(SIZES)
    with closing(second):
        assert {h.fd for h in stale.values()} == {h.fd for h in second.handles.values()}
        with pytest.raises(MegatrainError, match="cannot attach"):
            ArenaHolder.adopt([stale])


def test_a_failed_adoption_leaves_no_descriptor() -> None:
    owner = ArenaHolder.create(SIZES)
    gone = dict(owner.handles)
    with closing(owner):
        gone["state-0"] = ArenaHandle(os.getpid(), 999, 5000, "x")
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(MegatrainError):
            ArenaHolder.adopt([gone])
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def with_file(folder: Path) -> ArenaHolder:
    return ArenaHolder.create(SIZES, {"spill-0": SpillFile(folder, NBYTES)})


async def spilled(holder: ArenaHolder, offset: int, data: bytes) -> None:
    store, name = holder.spill("spill-0", DiskIo.POSIX)
    block = aligned_block(len(data))
    block[:] = data
    async with store.update(name) as blob:
        await blob.write_at(offset, block)


async def of_disk(holder: ArenaHolder) -> bytes:
    store, name = holder.spill("spill-0", DiskIo.POSIX)
    block = aligned_block(NBYTES)
    async with store.update(name) as blob:
        await blob.read_into(0, block)
    return bytes(block)


async def test_a_spill_file_outlives_its_maker(tmp_path: Path) -> None:
    data = bytes(range(256)) * (ALIGN_BYTES // 256)
    owner = with_file(tmp_path)
    of_owner = owner.handles
    peer = ArenaHolder.adopt([of_owner])
    await spilled(owner, ALIGN_BYTES, data)
    owner.close()
    second = ArenaHolder.adopt([of_owner, peer.handles])
    with closing(peer, second):
        assert await of_disk(second) == bytes(ALIGN_BYTES) + data + bytes(ALIGN_BYTES)
        assert second.handles.keys() == {*SIZES, "spill-0"}
        assert second.handles["spill-0"].nbytes == NBYTES
        assert list(tmp_path.iterdir()) == []


def adopted_from_a_killed_process(folder: Path) -> ArenaHolder:
    code = (
        "import os, pathlib, sys\n"
        "from megatrain_ray.io.arenas.arena_holder import ArenaHolder\n"
        "from megatrain_ray.io.storage.disk_io import SpillFile\n"
        "made = ArenaHolder.create({}, {'spill-0': SpillFile(pathlib.Path(sys.argv[1]), int(sys.argv[2]))}).handles\n"
        "os.pwrite(made['spill-0'].fd, b'made', 0)\n"
        "print(made['spill-0'].fd, made['spill-0'].name, made['spill-0'].path, sep='|', flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, folder, str(NBYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        fd, name, path = maker.stdout.readline().strip().split("|")
        holder = ArenaHolder.adopt([{"spill-0": ArenaHandle(maker.pid, int(fd), NBYTES, name, path)}])
        maker.kill()
    return holder


async def test_a_spill_file_outlives_the_process_that_made_it(tmp_path: Path) -> None:
    holder = adopted_from_a_killed_process(tmp_path)
    with closing(holder):
        assert (await of_disk(holder))[:5] == b"made\0"
        assert list(tmp_path.iterdir()) == []


async def test_a_spill_file_is_opened_past_the_page_cache(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        assert error.errno == errno.EINVAL
        pytest.skip("the temporary folder's file system knows no O_DIRECT")
    holder = with_file(tmp_path)
    with closing(holder):
        store, name = holder.spill("spill-0", DiskIo.POSIX)
        async with store.update(name) as blob:
            held = holder.handles["spill-0"]
            again = [int(p.name) for p in Path("/proc/self/fd").iterdir() if os.path.realpath(p) == held.path]
            direct = {fd for fd in again if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT}
            assert len(direct) == 1 and direct.isdisjoint({held.fd})
            await blob.write_at(0, aligned_block(ALIGN_BYTES))
            assert all(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT for fd in direct), "the transfer was not refused"


def test_spill_files_of_two_runs_are_never_mixed_up(tmp_path: Path) -> None:
    first = with_file(tmp_path)
    stale = first.handles["spill-0"]
    first.close()
    second = with_file(tmp_path)
    with closing(second):
        assert second.handles["spill-0"].fd == stale.fd
        with pytest.raises(MegatrainError, match=r"cannot attach spill file megatrain-[0-9a-f]{8}-spill-0 .* is /"):
            ArenaHolder.adopt([{"spill-0": stale}])


def test_a_spill_file_of_another_size_is_refused(tmp_path: Path) -> None:
    holder = with_file(tmp_path)
    with closing(holder):
        handle = replace(holder.handles["spill-0"], nbytes=NBYTES + ALIGN_BYTES)
        with pytest.raises(MegatrainError, match="cannot attach spill file"):
            ArenaHolder.adopt([{"spill-0": handle}])


def test_a_disk_that_is_full_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(DiskFullError, match=str(tmp_path)):
        with_file(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_memory_is_mapped_and_a_file_is_updated(tmp_path: Path) -> None:
    holder = with_file(tmp_path)
    with closing(holder):
        with pytest.raises(ValueError, match=r"spill-0 is the file .*, and no memory"):
            holder.map("spill-0")
        with pytest.raises(ValueError, match="words is an arena, and no file"):
            holder.spill("words", DiskIo.POSIX)


def test_the_owner_makes_the_files_and_takes_them_over(tmp_path: Path) -> None:
    owner = ArenaOwner(SIZES, files={"spill-0": SpillFile(tmp_path, NBYTES)})
    peer = ArenaHolder.adopt([owner.handles()])
    for one in (owner, ArenaOwner(SIZES, [peer.handles])):
        assert one.handles()["spill-0"].path == peer.handles["spill-0"].path
        one.stop()
        one.run()
    peer.close()
