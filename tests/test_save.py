"""Saves are exact onto any number of shards, and every damaged byte is found and named."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io import pieces as pieces_module
from megatrain_ray.io.blob_store import BlobStore, FileStore, MemoryStore
from megatrain_ray.io.manifest import LayerEntry
from megatrain_ray.io.pieces import Piece, write_blobs
from megatrain_ray.io.save import commit_save, list_saves, load_manifest, prepare_save, verify, write_part
from megatrain_ray.io.save_reader import SaveReader
from tests.saves import LAYERS, make_manifest, make_state, pieces_of, read_save, write_save


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts everywhere: stored pieces of a few KiB, chunks of less."""
    monkeypatch.setattr(pieces_module, "STORED_BYTES", 4096)
    monkeypatch.setattr(pieces_module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr("megatrain_ray.io.save_reader.CHUNK_BYTES", 1500)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("written_by", "read_by"), [(1, 3), (3, 1), (3, 2), (2, 2), (8, 3)])
@pytest.mark.parametrize("small", [False, True])
def test_a_save_restores_onto_any_number_of_shards(
    tmp_path: Path, precision: str, written_by: int, read_by: int, small: bool, request: pytest.FixtureRequest
) -> None:
    if small:
        request.getfixturevalue("small_pieces")
    state = make_state(precision)
    folder = write_save(tmp_path, 5, state, precision, written_by)
    assert read_save(tmp_path, 5, precision, read_by) == state
    assert verify(folder) == []
    assert list_saves(tmp_path) == [5]


async def test_state_in_memory_and_a_part_of_a_piece(small_pieces: None) -> None:
    store, state = MemoryStore(), make_state("bf16")
    manifest = make_manifest([await write_blobs(store, k, pieces_of(state, "bf16", k, 3)) for k in range(3)])
    buffer = bytearray(4 * 5000)
    await SaveReader(store, manifest).read([Piece("layers.0", "m", 3001, 8001, [memoryview(buffer)])])
    assert buffer == state["layers.0", "m"][4 * 3001 : 4 * 8001]


async def test_only_what_overlaps_is_read(small_pieces: None) -> None:
    class Counting(MemoryStore):
        num_bytes = 0

        async def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
            self.num_bytes += len(buffer)
            await super().read_into(name, offset, buffer)

    store = Counting()
    manifest = make_manifest([await write_blobs(store, 0, pieces_of(make_state("bf16"), "bf16", 0, 1))])
    await SaveReader(store, manifest).read([Piece("layers.0", "m", 1000, 1100, [memoryview(bytearray(400))])])
    assert store.num_bytes == 2 * 4096


def test_the_manifest_is_exact(tmp_path: Path) -> None:
    write_save(tmp_path, 3, make_state("fp32"), "fp32")
    manifest = load_manifest(tmp_path, 3)
    assert manifest == make_manifest(manifest.parts, "fp32", 3)
    assert {blob.name for blob in manifest.blobs()} == {
        f"part_{k}.{kind}" for k in (0, 1) for kind in ("master", "m", "v")
    }


@pytest.mark.parametrize("kind", ["working", "residual", "m", "v"])
@pytest.mark.parametrize("position", [0, 5000, -1])
def test_one_flipped_bit_is_found_and_named(tmp_path: Path, kind: str, position: int, small_pieces: None) -> None:
    folder = write_save(tmp_path, 1, make_state("bf16"))
    path = folder / f"part_0.{kind}"
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)
    layer = {0: "embed", 5000: "layers.0", -1: "head"}[position]
    message = rf"part_0.{kind} is damaged: {kind} of {layer}, elements .*expected checksum [0-9a-f]{{8}}, got"
    with pytest.raises(MegatrainError, match=message):
        read_save(tmp_path, 1, num_shards=3)
    (problem,) = verify(folder)
    assert f"{path} is damaged: {kind} of {layer}" in problem


def test_verify_names_everything_that_is_wrong(tmp_path: Path) -> None:
    folder = write_save(tmp_path, 1, make_state("bf16"))
    (folder / "part_0.m").unlink()
    blob = folder / "part_1.v"
    blob.write_bytes(blob.read_bytes()[:-1])
    problems = verify(folder)
    assert any("part_0.m: No such file" in p for p in problems)
    assert any(f"{blob} has another size: expected" in p for p in problems)
    with pytest.raises(MegatrainError, match=r"part_[01]\.[mv]"):
        read_save(tmp_path, 1)
    (folder / "manifest.json").unlink()
    assert verify(folder) == [
        f"cannot read {folder}/manifest.json: No such file or directory; without it there is no save"
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'{"version":1', b'{"version":2', "has format version 2, this release reads version 1"),
        (b'"step":1', b'"step":"one"', "is damaged: step: "),
        (b"}", b"", "is damaged: "),
        (b'{"version":1', b'[{"version":1', "is damaged: "),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    path = write_save(tmp_path, 1, make_state("bf16")) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(MegatrainError, match=f"{path} {message}"):
        load_manifest(tmp_path, 1)


async def test_what_the_save_does_not_hold_is_named(tmp_path: Path) -> None:
    store: BlobStore = MemoryStore()
    reader = SaveReader(
        store, make_manifest([await write_blobs(store, 0, pieces_of(make_state("bf16"), "bf16", 0, 2))])
    )
    for layer, kind, start, stop, nbytes, message in (
        ("layers.0", "master", 0, 1, 4, "holds no master, only working, residual, m, v"),
        ("layers.9", "m", 0, 1, 4, "does not hold element 0 of m of layers.9"),
        ("layers.0", "m", 0, LAYERS["layers.0"], 4 * LAYERS["layers.0"], "does not hold element 6208 of m of layers.0"),
        ("layers.0", "m", 0, 10, 39, "elements 0 to 10 of 4 bytes do not fill buffers of 39 bytes"),
    ):
        with pytest.raises(MegatrainError, match=message):
            await reader.read([Piece(layer, kind, start, stop, [memoryview(bytearray(nbytes))])])


async def test_a_piece_that_does_not_fill_its_buffers_is_not_written() -> None:
    for stop, nbytes in ((10, 39), (0, 0), (0, 4)):
        with pytest.raises(MegatrainError, match=f"m of embed: elements 0 to {stop} .* {nbytes} bytes"):
            await write_blobs(MemoryStore(), 0, [Piece("embed", "m", 0, stop, [memoryview(bytes(nbytes))])])


def test_memory_is_bounded_whatever_the_size_of_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the store at once, and how many at once."""
    largest, at_once, most = 0, 0, 0
    real_read = FileStore.read_into

    async def note(self: FileStore, name: str, offset: int, buffer: memoryview) -> None:
        nonlocal largest, at_once, most
        largest, at_once = max(largest, len(buffer)), at_once + 1
        most = max(most, at_once)
        await real_read(self, name, offset, buffer)
        at_once -= 1

    monkeypatch.setattr(FileStore, "read_into", note)
    size = 20 << 20
    state = bytearray(size)
    folder = prepare_save(tmp_path, 1)
    part = asyncio.run(write_part(folder, 0, [Piece("big", "m", 0, size // 4, [memoryview(state)])]))
    manifest = dataclasses.replace(make_manifest([part]), itemsize={"m": 4}, layers=(LayerEntry("big", size // 4, ()),))
    commit_save(tmp_path, 1, manifest)
    assert verify(folder) == []
    assert largest == pieces_module.CHUNK_BYTES
    assert most <= 4
