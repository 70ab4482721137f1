"""Arenas: shared between processes, robust against holders that are gone and views that are still in use."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.arenas import arena_holder
from megatrain_ray.io.arenas.arena_holder import (
    HUGE_PAGE,
    MADV_POPULATE_WRITE,
    ArenaHandle,
    ArenaHolder,
    Handles,
    create_memfd,
    mapped_bytes,
    piece_sizes,
)


def mapped_names() -> str:
    return Path("/proc/self/maps").read_text()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("nbytes", [0, 1, 4096, HUGE_PAGE, HUGE_PAGE + 1])
def test_any_size_can_be_mapped_and_is_zero(nbytes: int) -> None:
    with closing(ArenaHolder.create({"sizes": nbytes})) as holder:
        arena = holder.map("sizes")
        assert len(arena.buffer) == mapped_bytes(nbytes) >= nbytes
        assert len(arena.buffer) % HUGE_PAGE == 0
        assert arena.handle.nbytes == nbytes
        assert not any(arena.buffer[:4096])
        torch.frombuffer(arena.buffer, dtype=torch.uint8)[-1] = 7
        assert arena.buffer[-1] == 7


def test_an_arena_nobody_touched_takes_no_memory() -> None:
    fd = create_memfd("sparse", 1 << 40)
    assert resident_bytes(fd) == 0
    os.close(fd)


def test_an_arena_of_several_files_is_one_range_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last file is smaller; a process that adopts it sees the same bytes, and nothing is left of it."""
    monkeypatch.setattr(arena_holder, "MIN_PIECE_BYTES", HUGE_PAGE)
    monkeypatch.setattr(arena_holder, "MAX_PIECES", 3)
    monkeypatch.setattr(arena_holder, "POPULATE_BYTES", HUGE_PAGE // 2)
    nbytes, before = 5 * HUGE_PAGE - 100, open_files()
    assert [size // HUGE_PAGE for size in piece_sizes(nbytes)] == [2, 2, 1]
    with closing(ArenaHolder.create({"pieces": nbytes})) as owner, closing(ArenaHolder.adopt([owner.handles])) as peer:
        of_owner, of_peer = (torch.frombuffer(one.map("pieces").buffer, dtype=torch.uint8) for one in (owner, peer))
        assert len(of_owner) == mapped_bytes(nbytes)
        assert of_owner.data_ptr() % HUGE_PAGE == 0, "else its files would get no huge pages"
        of_owner.copy_(torch.arange(len(of_owner)) % 251)
        owner.map("pieces").populate(3)
        assert torch.equal(of_owner, of_peer)
        assert int(of_peer[-1]) == (len(of_owner) - 1) % 251
        del of_owner, of_peer
        handles = owner.handles
        with pytest.raises(MegatrainError, match="cannot attach arena"):
            ArenaHolder.adopt([{"pieces": replace(handles["pieces"], nbytes=nbytes - HUGE_PAGE)}])
    assert open_files() == before


def write_in_a_process(handles: Handles) -> None:
    with closing(ArenaHolder.adopt([handles])) as holder:
        buffer = holder.map("shared").buffer
        assert buffer[0] == 1
        buffer[1] = 2


def test_another_process_sees_and_writes_the_same_bytes() -> None:
    with closing(ArenaHolder.create({"shared": 100})) as holder:
        buffer = holder.map("shared").buffer
        buffer[0] = 1
        child = multiprocessing.get_context("spawn").Process(target=write_in_a_process, args=(holder.handles,))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert buffer[1] == 2


def test_a_holder_that_maps_nothing_is_enough() -> None:
    with closing(ArenaHolder.create({"held": 10})) as owner:
        handles = pickle.loads(pickle.dumps(owner.handles))
        with closing(ArenaHolder.adopt([handles])) as first:
            first.map("held").buffer[3] = 9
        assert "-held" not in mapped_names()
        with closing(ArenaHolder.adopt([handles])) as second:
            assert second.map("held").buffer[3] == 9, "the arena outlives those who map it"


def test_the_memory_outlives_its_holder_while_it_is_attached() -> None:
    owner = ArenaHolder.create({"orphan": 10})
    handles = owner.handles
    with closing(ArenaHolder.adopt([handles])) as peer:
        attached = peer.map("orphan")
    owner.map("orphan").buffer[0] = 5
    owner.close()
    assert attached.buffer[0] == 5
    with pytest.raises(MegatrainError, match=r"cannot attach arena megatrain-[0-9a-f]{8}-orphan"):
        ArenaHolder.adopt([handles])


def test_a_dead_holder_is_named() -> None:
    pid = int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True).stdout)
    with pytest.raises(MegatrainError, match=rf"arena state-0 \(64 bytes\) of process {pid}: .*No such file"):
        ArenaHolder.adopt([{"state-0": ArenaHandle(pid, 3, 64, "state-0")}])


@pytest.mark.parametrize(("name", "nbytes"), [("oth", 10), ("other", 3 * HUGE_PAGE)])
def test_something_else_behind_the_handle_is_refused(name: str, nbytes: int) -> None:
    before = open_files()
    fd = create_memfd("other", 10)
    try:
        stale = ArenaHandle(os.getpid(), fd, nbytes, name)
        with pytest.raises(MegatrainError, match=f"cannot attach arena {name} .* is /memfd:other"):
            ArenaHolder.adopt([{"other": stale}])
    finally:
        os.close(fd)
    assert open_files() == before


def test_close_leaves_nothing_behind() -> None:
    before = open_files()
    owner = ArenaHolder.create({"closing": 10})
    peer = ArenaHolder.adopt([owner.handles])
    arenas = [owner.map("closing"), peer.map("closing")]
    assert mapped_names().count("-closing") == 2
    for one in (*arenas, *arenas, peer, owner, owner):
        one.close()
    assert "-closing" not in mapped_names()
    assert open_files() == before
    with pytest.raises(MegatrainError, match=r"arena megatrain-[0-9a-f]{8}-closing is closed"):
        _ = arenas[-1].buffer


def test_a_tensor_keeps_the_memory_mapped_after_close() -> None:
    before = open_files()
    with closing(ArenaHolder.create({"viewed": 10})) as holder:
        arena = holder.map("viewed")
    tensor = torch.frombuffer(arena.buffer, dtype=torch.float32)
    arena.close()
    tensor[2] = 3.0
    assert tensor[2] == 3.0
    del tensor, arena
    gc.collect()
    assert "-viewed" not in mapped_names()
    assert open_files() == before


@pytest.mark.parametrize("advice", [MADV_POPULATE_WRITE, 12345])
def test_populate_takes_the_memory_and_keeps_what_is_there(advice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megatrain_ray.io.arenas.arena_holder.MADV_POPULATE_WRITE", advice
    )  # 12345: a kernel that does not know it
    monkeypatch.setattr("megatrain_ray.io.arenas.arena_holder.POPULATE_BYTES", HUGE_PAGE)
    nbytes = 3 * HUGE_PAGE + 5
    with closing(ArenaHolder.create({"populated": nbytes})) as holder:
        arena = holder.map("populated")
        arena.buffer[HUGE_PAGE] = 7
        arena.populate(2)
        assert resident_bytes(arena.handle.fd) >= nbytes
        assert arena.buffer[HUGE_PAGE] == 7
        assert sum(arena.buffer) == 7


def test_populate_says_what_it_could_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_ray.io.arenas.arena_holder.MADV_POPULATE_WRITE", 1000)
    with closing(ArenaHolder.create({"small": 0, "gone": HUGE_PAGE})) as holder:
        holder.map("small").populate(1)  # nothing to take, nothing asked of the kernel
        arena = holder.map("gone")
        os.truncate(arena.handle.fd, 0)
        monkeypatch.setattr("megatrain_ray.io.arenas.arena_holder.MADV_POPULATE_WRITE", MADV_POPULATE_WRITE)
        with pytest.raises(MegatrainError, match=f"cannot take {HUGE_PAGE} bytes of RAM for arena .*-gone"):
            arena.populate(1)
