"""Makes saves of a made-up model: three layers of awkward sizes with random bytes as state."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.io.saves.manifest import LayerEntry, Manifest, ParameterEntry, PartManifest
from megatrain_ray.io.saves.save_folder import (
    commit_save,
    load_manifest,
    prepare_save,
    read_pieces,
    save_folder,
    write_part,
)
from megatrain_ray.io.saves.save_writer import Piece

LAYERS = {"embed": 1000, "layers.0": 3 * 4096 + 1, "head": 7}
ITEMSIZES = {
    "bf16": {"working": 2, "residual": 2, "m": 4, "v": 4},
    "fp32": {"master": 4, "m": 4, "v": 4},
    "bf16 with bf16 moments": {"working": 2, "residual": 2, "m": 2, "v": 2},
}
State = dict[tuple[str, str], bytearray]  # by layer and kind


def make_state(precision: str, seed: int | None = 0) -> State:
    """Return state of random bytes that are finite numbers, or of zeros if there is no seed."""
    source = random.Random(seed)
    state: State = {}
    for layer, size in LAYERS.items():
        for kind, itemsize in ITEMSIZES[precision].items():
            state[layer, kind] = bytearray(source.randbytes(size * itemsize) if seed is not None else size * itemsize)
            if kind != "residual":
                make_finite(state[layer, kind], itemsize)
    return state


def make_finite(numbers: bytearray, itemsize: int) -> None:
    """Clear one bit of the exponent of every FP32 (itemsize 4) or bf16 (2) number."""
    numbers[itemsize - 1 :: itemsize] = bytes(byte & 0xBF for byte in numbers[itemsize - 1 :: itemsize])


def flip(path: Path, position: int, mask: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def pieces_of(state: State, precision: str, shard: int, num_shards: int) -> Iterator[Piece]:
    """Yield a shard's pieces, each in three buffers of unequal size, as parameters cut a layer.

    Shards may own nothing.
    """
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
        precision=precision.partition(" with ")[0],
        moments="bf16" if precision.endswith("moments") else "fp32",
        itemsize=ITEMSIZES[precision],
        layers=layers,
        data={"epoch": 1, "cursor": 2**60},
        model={"model_type": "llama", "rms_norm_eps": 1e-5},
        config={"train": {"betas": [0.9, 0.95], "clip": None}},
        parts=tuple(parts),
    )


def write_save(
    saves: Path,
    step: int,
    state: State,
    precision: str = "bf16",
    num_shards: int = 2,
    compression: SaveCompression = "none",
    token: str | None = None,
) -> Path:
    folder = prepare_save(saves, step, token)

    def write(k: int) -> PartManifest:
        pieces = pieces_of(state, precision, k, num_shards)
        return asyncio.run(write_part(folder, k, pieces, compression=compression))

    parts = [pickle.loads(pickle.dumps(write(k))) for k in range(num_shards)]
    commit_save(saves, step, replace(make_manifest(parts, precision, step), run=token))
    return folder


def read_save(saves: Path, step: int, precision: str = "bf16", num_shards: int = 1) -> State:
    state = make_state(precision, None)
    manifest = load_manifest(saves, step)
    for k in range(num_shards):
        wanted = pieces_of(state, precision, k, num_shards)
        asyncio.run(read_pieces(save_folder(saves, step), manifest, wanted))
    return state
