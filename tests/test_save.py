"""Saves: exact onto any number of shards, there or not there, and every damaged byte found and named."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import pickle
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io import pieces as pieces_module
from megatrain_ray.io.blob_store import BlobStore, FileStore, MemoryStore
from megatrain_ray.io.manifest import LayerEntry, Manifest, ParameterEntry, PartManifest
from megatrain_ray.io.pieces import Piece, write_blobs
from megatrain_ray.io.save import (
    clean_unfinished,
    commit_save,
    list_saves,
    load_manifest,
    prepare_save,
    prune,
    read_pieces,
    save_folder,
    verify,
    write_part,
)
from megatrain_ray.io.save_reader import SaveReader

LAYERS = {"embed": 1000, "layers.0": 3 * 4096 + 1, "head": 7}
ITEMSIZES = {
    "bf16": {"working": 2, "residual": 2, "m": 4, "v": 4},
    "fp32": {"master": 4, "m": 4, "v": 4},
}
State = dict[tuple[str, str], bytearray]  # by layer and kind


def make_state(precision: str, seed: int | None = 0) -> State:
    """Random bytes; zeros without a seed."""
    sizes = {(layer, kind): n * LAYERS[layer] for layer in LAYERS for kind, n in ITEMSIZES[precision].items()}
    source = random.Random(seed)
    return {key: bytearray(source.randbytes(n) if seed is not None else n) for key, n in sizes.items()}


def pieces_of(state: State, precision: str, shard: int, num_shards: int) -> Iterator[Piece]:
    """A shard's pieces; each in three buffers of unequal size, as parameters cut a layer. Shards may own nothing."""
    for layer, size in LAYERS.items():
        edges = [min(size, -(-size // (64 * num_shards)) * 64 * k) for k in range(num_shards)] + [size]
        start, stop = edges[shard], edges[shard + 1]
        if start == stop:
            continue
        for kind, n in ITEMSIZES[precision].items():
            view = memoryview(state[layer, kind])[start * n : stop * n]
            cuts = [0, len(view) // 7 // n * n, len(view) // 2 // n * n, len(view)]
            yield Piece(layer, kind, start, stop, [view[a:b] for a, b in itertools.pairwise(cuts)])


def make_manifest(parts: Iterable[PartManifest], precision: str = "bf16", step: int = 1) -> Manifest:
    layers = tuple(LayerEntry(name, n, (ParameterEntry(f"{name}.w", (n,), 0),)) for name, n in LAYERS.items())
    return Manifest(
        version=1,
        step=step,
        optimizer_step=step - 1,
        num_skipped=1,
        precision=precision,
        itemsize=ITEMSIZES[precision],
        layers=layers,
        data={"epoch": 1, "cursor": 2**60},
        model={"model_type": "llama", "rms_norm_eps": 1e-5},
        config={"train": {"betas": [0.9, 0.95], "clip": None}},
        parts=tuple(parts),
    )


def write_save(saves: Path, step: int, state: State, precision: str = "bf16", num_shards: int = 2) -> Path:
    folder = prepare_save(saves, step)
    parts = [
        pickle.loads(pickle.dumps(asyncio.run(write_part(folder, k, pieces_of(state, precision, k, num_shards)))))
        for k in range(num_shards)
    ]
    commit_save(saves, step, make_manifest(parts, precision, step))
    return folder


def read_save(saves: Path, step: int, precision: str = "bf16", num_shards: int = 1) -> State:
    state = make_state(precision, None)
    manifest = load_manifest(saves, step)
    for k in range(num_shards):
        wanted = pieces_of(state, precision, k, num_shards)
        asyncio.run(read_pieces(save_folder(saves, step), manifest, wanted))
    return state


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


def test_what_a_killed_save_left_is_no_save(tmp_path: Path) -> None:
    state = make_state("bf16")
    write_save(tmp_path, 1, state)
    torn = prepare_save(tmp_path, 2)
    asyncio.run(write_part(torn, 0, pieces_of(state, "bf16", 0, 2)))
    (torn / "manifest.json.partial").write_bytes(b"{")
    assert list_saves(tmp_path) == [1]
    assert prepare_save(tmp_path, 2) == torn
    assert list(torn.iterdir()) == []
    clean_unfinished(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    assert read_save(tmp_path, 1) == state
    clean_unfinished(tmp_path / "none")


def test_nothing_is_committed_before_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of what must survive a power failure: the manifest's bytes, the blobs' names, its name, the folders."""
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def note_fsync(fd: int) -> None:
        events.append("fsync " + Path(f"/proc/self/fd/{fd}").readlink().name)
        real_fsync(fd)

    def note_rename(source: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return real_rename(source, target)

    monkeypatch.setattr("os.fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    write_save(tmp_path / "saves", 4, make_state("fp32"), "fp32", 1)
    assert sorted(events[:3]) == ["fsync part_0.m", "fsync part_0.master", "fsync part_0.v"]
    assert events[3:] == [
        "fsync manifest.json.partial",
        "fsync step_4",
        "rename manifest.json",
        "fsync step_4",
        "fsync saves",
        f"fsync {tmp_path.name}",
    ]


class FaultyStore(FileStore):
    """The `fail_on`th write fails after its first chunk, as a full disk does."""

    def __init__(self, folder: Path, fail_on: int) -> None:
        super().__init__(folder)
        self._left = fail_on

    async def write(self, name: str, chunks: Iterable[memoryview]) -> int:
        self._left -= 1
        if self._left:
            return await super().write(name, chunks)
        await super().write(name, [next(iter(chunks))])
        raise MegatrainError(f"cannot write {name}: No space left on device")


def test_a_disk_that_gets_full_leaves_the_last_save_good(tmp_path: Path) -> None:
    state = make_state("bf16")
    write_save(tmp_path, 1, state)
    folder = prepare_save(tmp_path, 2)
    with pytest.raises(MegatrainError, match=r"part_0.m: No space left"):
        asyncio.run(write_blobs(FaultyStore(folder, 3), 0, pieces_of(make_state("bf16", 9), "bf16", 0, 1)))
    assert list_saves(tmp_path) == [1]
    clean_unfinished(tmp_path)
    assert verify(save_folder(tmp_path, 1)) == []
    assert read_save(tmp_path, 1) == state


def test_a_save_that_is_not_whole_is_not_committed(tmp_path: Path) -> None:
    state, folder = make_state("bf16"), prepare_save(tmp_path, 1)
    parts = [asyncio.run(write_part(folder, k, pieces_of(state, "bf16", k, 2))) for k in (0, 1)]
    with pytest.raises(MegatrainError, match=r"step_1 would not be whole: working of embed: .*1000 elements once"):
        commit_save(tmp_path, 1, make_manifest(parts[:1]))
    with pytest.raises(MegatrainError, match="would not be whole"):
        commit_save(tmp_path, 1, make_manifest([*parts, parts[0]]))
    with (folder / "part_1.v").open("ab") as file:
        file.write(b"!")
    with pytest.raises(MegatrainError, match=r"part_1.v has another size"):
        commit_save(tmp_path, 1, make_manifest(parts))
    (folder / "part_1.v").unlink()
    with pytest.raises(MegatrainError, match=r"part_1.v: No such file"):
        commit_save(tmp_path, 1, make_manifest(parts))
    assert list_saves(tmp_path) == []


def test_a_good_save_is_never_overwritten(tmp_path: Path) -> None:
    write_save(tmp_path, 1, make_state("bf16"))
    with pytest.raises(MegatrainError, match="step_1 is a finished save already"):
        prepare_save(tmp_path, 1)
    assert verify(save_folder(tmp_path, 1)) == []


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


def test_the_last_saves_are_kept(tmp_path: Path) -> None:
    for step in (2, 10, 9, 100):
        write_save(tmp_path, step, make_state("fp32"), "fp32", 1)
    (tmp_path / "step_x").mkdir()
    assert list_saves(tmp_path) == [2, 9, 10, 100]
    prune(tmp_path, 3)
    assert list_saves(tmp_path) == [9, 10, 100]
    prune(tmp_path, 0)
    assert list_saves(tmp_path) == [100]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_100", "step_x"]


def test_a_half_deleted_save_never_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write_save(tmp_path, step, make_state("fp32"), "fp32", 1)

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1)
    assert list_saves(tmp_path) == [2]
    assert (save_folder(tmp_path, 1) / "part_0.m").exists()


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
