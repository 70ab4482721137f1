"""Saves are exact onto any number of shards, compressed or not, and every damaged byte is found and named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.errors import DamagedSaveError, MegatrainError
from megatrain_ray.io.saves import save_writer as pieces_module
from megatrain_ray.io.saves.manifest import _sealed
from megatrain_ray.io.saves.save_folder import list_saves, load_manifest, save_room, verify
from megatrain_ray.io.saves.save_reader import SaveReader
from megatrain_ray.io.saves.save_writer import Piece, write_blobs
from megatrain_ray.io.storage.blob_store import FileStore, SaveStore, aligned
from tests.support.memory_store import MemoryStore
from tests.support.saves import LAYERS, flip, make_manifest, make_state, pieces_of, read_save, write_save

COMPRESSIONS: tuple[SaveCompression, ...] = ("none", "zstd")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts everywhere: stored pieces of a few KiB, chunks of less."""
    monkeypatch.setattr(pieces_module, "STORED_BYTES", 4096)
    monkeypatch.setattr(pieces_module, "CHUNK_BYTES", 1000)


@pytest.mark.pairwise
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("written_by", "read_by"), [(1, 3), (3, 1), (3, 2), (2, 2), (8, 3)])
@pytest.mark.parametrize(("small", "compression"), [(False, "none"), (True, "none"), (False, "zstd"), (True, "zstd")])
def test_a_save_restores_onto_any_number_of_shards(
    tmp_path: Path,
    precision: str,
    written_by: int,
    read_by: int,
    small: bool,
    compression: SaveCompression,
    request: pytest.FixtureRequest,
) -> None:
    if small:
        request.getfixturevalue("small_pieces")
    state = make_state(precision)
    folder = write_save(tmp_path, 5, state, precision, written_by, compression)
    assert read_save(tmp_path, 5, precision, read_by) == state
    assert verify(folder) == []
    assert list_saves(tmp_path) == [5]
    assert sum(p.stat().st_size for p in folder.iterdir()) < save_room(
        sum(map(len, state.values())), len(LAYERS), written_by
    )


async def test_state_in_memory_and_a_part_of_a_piece(small_pieces: None) -> None:
    store, state = MemoryStore(), make_state("bf16")
    manifest = make_manifest([await write_blobs(store, k, pieces_of(state, "bf16", k, 3)) for k in range(3)])
    buffer = bytearray(4 * 5000)
    await SaveReader(store, manifest).read([Piece("layers.0", "m", 3001, 8001, [memoryview(buffer)])])
    assert buffer == state["layers.0", "m"][4 * 3001 : 4 * 8001]


async def test_only_what_overlaps_is_read(small_pieces: None) -> None:
    class Counting(MemoryStore):
        num_bytes = 0

        async def read_into(self, name: str, offset: int, block: memoryview) -> None:
            self.num_bytes += len(block)
            await super().read_into(name, offset, block)

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


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_equal_states_make_equal_saves(tmp_path: Path, compression: SaveCompression, small_pieces: None) -> None:
    """Whichever of the workers is the first."""
    folders = [write_save(tmp_path, step, make_state("bf16"), compression=compression) for step in (1, 2)]
    for path in folders[0].glob("part_*"):
        assert path.read_bytes() == (folders[1] / path.name).read_bytes()


def test_compression_shrinks_numbers_that_resemble_each_other(tmp_path: Path) -> None:
    state = make_state("fp32")
    for values in state.values():
        values[3::4] = bytes([0x3C]) * len(values[3::4])  # as if all had the same exponent
    sizes = [
        sum(p.stat().st_size for p in write_save(tmp_path, k, state, "fp32", 1, compression).glob("part_*"))
        for k, compression in enumerate(COMPRESSIONS)
    ]
    assert sizes[1] < 0.85 * sizes[0]
    assert read_save(tmp_path, 1, "fp32") == state


@pytest.mark.pairwise
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("kind", ["working", "residual", "m", "v"])
@pytest.mark.parametrize("layer", list(LAYERS))
def test_one_flipped_bit_is_found_and_named(
    tmp_path: Path, compression: SaveCompression, kind: str, layer: str, small_pieces: None
) -> None:
    folder = write_save(tmp_path, 1, make_state("bf16"), compression=compression)
    blob = next(blob for blob in load_manifest(tmp_path, 1).blobs() if blob.name == f"part_0.{kind}")
    piece = [piece for piece in blob.pieces if piece.layer == layer][-1]
    flip(folder / blob.name, piece.offset + piece.nbytes // 2)
    message = rf"part_0.{kind} is damaged: {kind} of {layer}, elements {piece.start} to {piece.stop}: "
    with pytest.raises(DamagedSaveError, match=message):
        read_save(tmp_path, 1, num_shards=3)
    (problem,) = verify(folder)
    assert f"{folder / blob.name} is damaged: {kind} of {layer}" in problem


def test_a_bit_that_means_nothing_to_zstd_is_found_too(tmp_path: Path) -> None:
    folder = write_save(tmp_path, 1, make_state("bf16"), compression="zstd")
    flip(folder / "part_0.m", 4, 0x10)  # the unused bit of the frame header's descriptor
    (problem,) = verify(folder)
    assert "part_0.m is damaged: m of embed, elements 0 to 512: expected checksum" in problem


def test_what_is_not_what_was_written_is_not_handed_out(tmp_path: Path) -> None:
    folder = write_save(tmp_path, 1, make_state("bf16"))
    flip(folder / "part_0.m", 0)
    buffer = bytearray(4)
    reader = SaveReader(FileStore(folder), load_manifest(tmp_path, 1))
    with pytest.raises(DamagedSaveError):
        asyncio.run(reader.read([Piece("embed", "m", 0, 1, [memoryview(buffer)])]))
    assert buffer == bytes(4)


def test_verify_names_everything_that_is_wrong(tmp_path: Path) -> None:
    folder = write_save(tmp_path, 1, make_state("bf16"))
    (folder / "part_0.m").unlink()
    blob = folder / "part_1.v"
    blob.write_bytes(blob.read_bytes()[:-1])
    problems = verify(folder)
    assert any("part_0.m: No such file" in p for p in problems)
    assert any(f"{blob} has another size: expected" in p for p in problems)
    assert len(problems) == 2
    with pytest.raises(DamagedSaveError, match=r"part_[01]\.[mv]"):
        read_save(tmp_path, 1)
    (folder / "manifest.json").unlink()
    assert verify(folder) == [
        f"cannot read {folder}/manifest.json: No such file or directory; without it there is no save"
    ]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: _sealed(text.replace(b'"step":1', b'"step":"one"')), "is damaged: step: "),
        (lambda text: _sealed(b"1" + text), "is damaged: Extra data"),
        (lambda text: text, "is damaged: it does not end with its checksum"),
        (lambda text: b"", "is damaged: it does not end with its checksum"),
        (
            lambda text: _sealed(text).replace(b'"optimizer_step":0', b'"optimizer_step":1'),
            "is damaged: expected checksum [0-9a-f]{8}, got [0-9a-f]{8}",
        ),
    ],
)
def test_a_manifest_that_is_not_what_was_written_is_named(
    tmp_path: Path, edit: Callable[[bytes], bytes], message: str
) -> None:
    path = write_save(tmp_path, 1, make_state("bf16")) / "manifest.json"
    path.write_bytes(edit(path.read_bytes().rpartition(b',"crc32"')[0] + b"}"))
    with pytest.raises(DamagedSaveError, match=f"{path} {message}"):
        load_manifest(tmp_path, 1)


def test_a_save_of_another_version_is_not_called_damaged(tmp_path: Path) -> None:
    path = write_save(tmp_path, 1, make_state("bf16")) / "manifest.json"
    text = path.read_bytes().rpartition(b',"crc32"')[0] + b"}"
    path.write_bytes(_sealed(text.replace(b'{"version":1', b'{"version":2')))
    with pytest.raises(MegatrainError, match="has format version 2, this release reads version 1") as caught:
        load_manifest(tmp_path, 1)
    assert not isinstance(caught.value, DamagedSaveError)


async def test_what_the_save_does_not_hold_is_named() -> None:
    store: SaveStore = MemoryStore()
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


class Watching(MemoryStore):
    """A store that records the largest block that is read, and how many reads there are at once at most."""

    largest = at_once = most = 0

    async def read_into(self, name: str, offset: int, block: memoryview) -> None:
        self.largest, self.at_once = max(self.largest, len(block)), self.at_once + 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0)
        await super().read_into(name, offset, block)
        self.at_once -= 1


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_memory_is_bounded_whatever_the_size_of_a_piece(compression: SaveCompression, small_pieces: None) -> None:
    store, taken_bytes, done_bytes = Watching(), 0, 0

    def pieces() -> Iterator[Piece]:
        """Says how far the iteration is ahead of what was written."""
        nonlocal taken_bytes
        for piece in pieces_of(make_state("bf16"), "bf16", 0, 1):
            assert taken_bytes - done_bytes <= 4096 * pieces_module.WRITES_AT_ONCE[compression]
            taken_bytes += piece.nbytes
            yield piece

    def note(part: Piece) -> None:
        nonlocal done_bytes
        done_bytes += part.nbytes

    manifest = make_manifest([await write_blobs(store, 0, pieces(), note, compression)])
    assert done_bytes == taken_bytes > 12 * 4096
    assert await SaveReader(store, manifest).problems() == []
    assert 4096 <= store.largest <= aligned(4096 + 16 + 64)
    assert store.most <= 6
