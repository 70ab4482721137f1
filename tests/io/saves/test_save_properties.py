"""What holds for every manifest, every cut and every byte of a save."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.errors import DamagedSaveError
from megatrain_ray.io.saves import manifest as manifests_read
from megatrain_ray.io.saves import save_writer as pieces_module
from megatrain_ray.io.saves.manifest import (
    MANIFEST_NAME,
    BlobEntry,
    LayerEntry,
    Manifest,
    ParameterEntry,
    PartManifest,
    PieceEntry,
    SaveTiming,
    read_manifest,
)
from megatrain_ray.io.saves.save_reader import SaveReader
from megatrain_ray.io.saves.save_writer import Piece, write_blobs
from tests.support.memory_store import MemoryStore
from tests.support.saves import ITEMSIZES, LAYERS, make_manifest, make_state, pieces_of

names = st.text(max_size=12)
sizes = st.integers(0, 2**62)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(names, plain, max_size=3)
compressions = st.sampled_from(["none", "zstd"])
piece_entries = st.builds(PieceEntry, names, sizes, sizes, sizes, sizes, st.integers(0, 2**32 - 1))
blob_entries = st.builds(BlobEntry, names, names, compressions, sizes, st.lists(piece_entries, max_size=3).map(tuple))
parameters = st.builds(ParameterEntry, names, st.lists(sizes, max_size=3).map(tuple), sizes, st.none() | names)
seconds = st.floats(0, 1e9)
manifests = st.builds(
    Manifest,
    version=st.just(1),
    step=sizes,
    optimizer_step=sizes,
    num_skipped=sizes,
    precision=names,
    itemsize=st.dictionaries(names, sizes, max_size=3),
    layers=st.lists(st.builds(LayerEntry, names, sizes, st.lists(parameters, max_size=2).map(tuple)), max_size=2).map(
        tuple
    ),
    data=objects,
    model=objects,
    config=objects,
    parts=st.lists(st.builds(PartManifest, sizes, st.lists(blob_entries, max_size=2).map(tuple)), max_size=2).map(
        tuple
    ),
    generation_config=st.none() | objects,
    timing=st.none() | st.builds(SaveTiming, seconds, seconds, seconds, sizes),
)


@given(manifests)
def test_a_manifest_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, manifest: Manifest) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifests_read, "_problems", lambda drawn: iter(()))  # its parts need not fit together
        assert read_manifest(folder) == manifest


@given(st.data())
def test_any_changed_byte_of_a_manifest_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp()
    text = bytearray(stored("none")[1].to_json())
    text[data.draw(st.integers(0, len(text) - 1))] ^= data.draw(st.integers(1, 255))
    (folder / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(DamagedSaveError, match=f"{folder / MANIFEST_NAME} is damaged"):
        read_manifest(folder)


cuts = st.sets(st.integers(1, 99), max_size=8).map(lambda edges: list(itertools.pairwise([0, *sorted(edges), 100])))


def manifest_of(spans: Sequence[tuple[int, int]]) -> Manifest:
    """100 elements of a layer in two parts."""
    entries = [PieceEntry("layer", start, stop, 0, stop - start, 0) for start, stop in spans]
    parts = [PartManifest(k, (BlobEntry(f"{k}", "m", "none", 0, tuple(entries[k::2])),)) for k in range(2)]
    return dataclasses.replace(make_manifest(parts), itemsize={"m": 1}, layers=(LayerEntry("layer", 100, ()),))


@given(cuts, st.data())
def test_every_hole_and_every_overlap_is_found(spans: list[tuple[int, int]], data: st.DataObject) -> None:
    assert manifest_of(spans).gaps() == []
    k = data.draw(st.integers(0, len(spans) - 1))
    start, stop = spans[k]
    other = data.draw(st.tuples(st.integers(0, 120), st.integers(0, 120)).filter(lambda span: span != spans[k]))
    for wrong in ([], [other], [spans[k], spans[k]], [(stop, start)]):
        (gap,) = manifest_of([*spans[:k], *wrong, *spans[k + 1 :]]).gaps()
        assert gap.startswith("m of layer: expected each of 100 elements once")


def test_a_span_that_goes_back_is_no_cover() -> None:
    assert len(manifest_of([(0, 120), (120, 100)]).gaps()) == 1


def cut(layer: str, kind: str, values: bytearray, itemsize: int, spans: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    for start, stop in spans:
        yield Piece(layer, kind, start, stop, [memoryview(values)[start * itemsize : stop * itemsize]])


def edges(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    inner = st.sets(st.integers(1, size - 1), max_size=4)
    return inner.map(lambda found: list(itertools.pairwise([0, *sorted(found), size])))


@given(st.data(), compressions, st.sampled_from([64, 4096, 8192]), st.sampled_from([100, 4096]))
def test_any_cuts_written_and_any_cuts_read_give_the_same_bytes(
    data: st.DataObject, compression: SaveCompression, stored_bytes: int, chunk_bytes: int
) -> None:
    expected, restored = make_state("bf16"), make_state("bf16", None)
    itemsizes = ITEMSIZES["bf16"]

    def pieces(state: dict[tuple[str, str], bytearray]) -> list[Piece]:
        return [
            piece
            for layer, size in LAYERS.items()
            for kind, itemsize in itemsizes.items()
            for piece in cut(layer, kind, state[layer, kind], itemsize, data.draw(edges(size)))
        ]

    async def write_and_read(store: MemoryStore) -> None:
        part = await write_blobs(store, 0, pieces(expected), compression=compression)
        reader = SaveReader(store, make_manifest([part]))
        assert await reader.problems() == []
        await reader.read(pieces(restored))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "STORED_BYTES", stored_bytes)
        patch.setattr(pieces_module, "CHUNK_BYTES", chunk_bytes)
        asyncio.run(write_and_read(MemoryStore()))
    assert restored == expected


@cache
def stored(compression: SaveCompression) -> tuple[MemoryStore, Manifest]:
    store = MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "STORED_BYTES", 8192)
        pieces = pieces_of(make_state("bf16"), "bf16", 0, 1)
        return store, make_manifest([asyncio.run(write_blobs(store, 0, pieces, compression=compression))])


@given(st.data(), compressions)
def test_any_changed_byte_of_any_blob_is_found(data: st.DataObject, compression: SaveCompression) -> None:
    """Even a byte that changes nothing that is read is found: a bit without meaning in a frame's header, the filler."""
    store, manifest = stored(compression)
    blob = data.draw(st.sampled_from(manifest.parts[0].blobs))
    position = (
        data.draw(st.sampled_from(blob.pieces)).offset + data.draw(st.integers(0, 20))
        if data.draw(st.booleans())
        else data.draw(st.integers(0, blob.nbytes - 1))
    )
    mask = data.draw(st.integers(1, 255))
    content = store._blobs[blob.name]
    content[position] ^= mask
    try:
        (problem,) = asyncio.run(SaveReader(store, manifest).problems())
        assert f"{blob.name} in memory is damaged: {blob.kind} of " in problem
        wanted = [piece for piece in pieces_of(make_state("bf16", None), "bf16", 0, 3) if piece.kind == blob.kind]
        wanted += [piece for k in (1, 2) for piece in pieces_of(make_state("bf16", None), "bf16", k, 3)]
        with pytest.raises(DamagedSaveError, match=blob.name):
            asyncio.run(SaveReader(store, manifest).read(wanted))
    finally:
        content[position] ^= mask
