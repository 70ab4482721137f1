"""A part is written while its pieces are still being made, and lets go of each as soon as its bytes are read."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.saves import save_writer as pieces_module
from megatrain_ray.io.saves.save_folder import abandon_save, commit_save, prepare_save, write_part
from megatrain_ray.io.saves.save_writer import Piece, write_blobs
from tests.support.memory_store import MemoryStore
from tests.support.saves import make_manifest, make_state, pieces_of, read_save

WAIT_S = 20.0


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_layer_may_change_once_it_is_done_and_the_next_need_not_be_there(
    tmp_path: Path, compression: SaveCompression, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like training: a layer comes only after the one before was let go of and overwritten."""
    monkeypatch.setattr(pieces_module, "STORED_BYTES", 4096)
    expected, state = make_state("bf16"), make_state("bf16")
    let_go: queue.Queue[Piece] = queue.Queue()

    def pieces() -> Iterator[Piece]:
        everything = list(pieces_of(state, "bf16", 0, 1))
        for layer in dict.fromkeys(piece.layer for piece in everything):
            own = [piece for piece in everything if piece.layer == layer]
            yield from own
            left = sum(piece.nbytes for piece in own)
            while left:
                part = let_go.get(timeout=WAIT_S)
                assert part.layer == layer
                for buffer in part.buffers:
                    buffer[:] = b"\xff" * len(buffer)
                left -= part.nbytes

    folder = prepare_save(tmp_path, 1)
    part = asyncio.run(write_part(folder, 0, pieces(), let_go.put, compression))
    commit_save(tmp_path, 1, make_manifest([part]))
    assert read_save(tmp_path, 1) == expected


def test_a_kind_that_comes_last_or_alone_holds_nothing_up() -> None:
    """All of one kind, then all of the other: kinds progress as unevenly as they can."""
    state = make_state("fp32")
    pieces = sorted(pieces_of(state, "fp32", 0, 1), key=lambda piece: piece.kind)
    part = asyncio.run(write_blobs(MemoryStore(), 0, pieces))
    assert [blob.kind for blob in part.blobs] == ["m", "master", "v"]
    assert part.blobs[0].pieces[-1].layer == pieces[2].layer


class FailingBlob:
    async def write_at(self, offset: int, block: memoryview) -> None:
        raise MegatrainError("the disk is gone")


def test_an_error_of_one_blob_ends_all_and_no_piece_is_asked_for_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.memory_store._MemoryBlob", lambda blob: FailingBlob())
    asked = 0

    def endless() -> Iterator[Piece]:
        nonlocal asked
        while True:
            asked += 1
            yield Piece("embed", f"kind {asked % 4}", 0, 1, [memoryview(bytes(4))])

    with pytest.raises(MegatrainError, match="the disk is gone"):
        asyncio.run(write_blobs(MemoryStore(), 0, endless()))
    assert asked < 100


def test_an_error_is_told_while_the_next_piece_is_still_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever makes it can be told to stop."""
    monkeypatch.setattr("tests.support.memory_store._MemoryBlob", lambda blob: FailingBlob())
    stop = threading.Event()

    def pieces() -> Iterator[Piece]:
        yield Piece("embed", "m", 0, 1, [memoryview(bytes(4))])
        assert stop.wait(WAIT_S)

    async def write() -> None:
        with pytest.raises(MegatrainError, match="the disk is gone"):
            await write_blobs(MemoryStore(), 0, pieces())
        stop.set()

    asyncio.run(write())


async def test_what_the_pieces_raise_passes_through() -> None:
    def pieces() -> Iterator[Piece]:
        yield next(pieces_of(make_state("bf16"), "bf16", 0, 1))
        raise LookupError("the shard was stopped")

    with pytest.raises(LookupError, match="the shard was stopped"):
        await write_blobs(MemoryStore(), 0, pieces())


async def test_a_writer_that_was_given_up_touches_no_save_made_after_it(tmp_path: Path) -> None:
    """It hangs in the disk while its save is abandoned and made again for the same step; then it goes on."""
    old, new = make_state("bf16", 1), make_state("bf16", 2)
    first = prepare_save(tmp_path, 1)
    hanging, made_again = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def pieces() -> Iterator[Piece]:
        for index, piece in enumerate(pieces_of(old, "bf16", 0, 1)):
            if index == 1:
                loop.call_soon_threadsafe(hanging.set)
                assert made_again.wait(WAIT_S)
            yield piece

    late = asyncio.create_task(write_part(first, 0, pieces()))
    await hanging.wait()
    abandon_save(tmp_path, 1)
    part = await write_part(prepare_save(tmp_path, 1), 0, pieces_of(new, "bf16", 0, 1))
    await asyncio.to_thread(commit_save, tmp_path, 1, make_manifest([part]))
    made_again.set()
    with pytest.raises(MegatrainError, match=r"cannot write .*step_1/part_0.*No such file"):
        await late
    assert await asyncio.to_thread(read_save, tmp_path, 1) == new
