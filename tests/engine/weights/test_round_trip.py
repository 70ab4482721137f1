"""A folder of weights through shards and a save to a folder again: the same bytes, and little memory on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.split_master import split, to_working
from megatrain_ray.engine.shards import shard_state
from megatrain_ray.engine.weights.export_save import export_save
from megatrain_ray.io.checkpoints.safetensors_folder import INDEX_NAME, SINGLE_NAME, WeightFolder
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype
from megatrain_ray.io.saves.manifest import LayerEntry, Manifest, ParameterEntry
from megatrain_ray.io.saves.save_folder import commit_save, prepare_save, save_folder, write_part
from tests.support.shards import Shards, model_layout, open_shards

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BITS = {BF16: torch.int16, FP16: torch.int16, FP32: torch.int32}


def finite_bits(num: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return random bits of all kinds but NaN and infinity: denormals, -0, ties."""
    bits = torch.randint(0, 256, (num * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    values = bits.to(torch.uint8).view(dtype)
    return torch.where(values.isfinite(), values, torch.zeros((), dtype=dtype))


def random_folder(folder: Path, layout: ModelLayout, dtype: torch.dtype, num_files: int) -> dict[str, Tensor]:
    """Parameters dealt to files in turn."""
    segments = [segment for layer in layout.layers for segment in layer.owned]
    weights = {s.name: finite_bits(s.numel, dtype, k).view(s.shape) for k, s in enumerate(segments)}
    files = [f"model-{k:05}-of-{num_files:05}.safetensors" for k in range(1, num_files + 1)]
    if num_files == 1:
        safetensors.torch.save_file(weights, folder / SINGLE_NAME)
        return weights
    places = {name: files[k % num_files] for k, name in enumerate(weights)}
    for file in files:
        safetensors.torch.save_file({n: w for n, w in weights.items() if places[n] == file}, folder / file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    return weights


def save(shards: Shards, saves: Path, precision: Precision, checksums: Sequence[int | None] | None = None) -> Manifest:
    """Write a save of the shards. `checksums`: those of the frozen weights, if the shards leave these out."""
    layers = []
    for flat, checksum in zip(shards.layout.layers, checksums or [None] * len(shards.layout.layers), strict=True):
        starts, entries = 0, list[ParameterEntry]()
        for segment in flat.segments:
            entries.append(ParameterEntry(segment.name, segment.shape, starts, segment.tied_to))
            starts += segment.numel
        num_frozen = starts - flat.num_trained
        layers.append(LayerEntry(flat.name, starts, tuple(entries), num_frozen, flat.num_muon, checksum))
    folder = prepare_save(saves, 0)

    pieces = [[p for i in range(len(layers)) for p in shard.pieces(i)] for shard in shards.shards]
    parts = tuple(asyncio.run(write_part(folder, k, part)) for k, part in enumerate(pieces))
    working = "working" if precision is Precision.BF16 else "master"
    itemsize = {working: precision.working_dtype.itemsize} | {k: t.itemsize for k, t in precision.state_kinds}
    manifest = Manifest(
        version=1,
        step=0,
        optimizer_step=0,
        num_skipped=0,
        precision=precision.value,
        itemsize=itemsize,
        layers=tuple(layers),
        data={},
        model={},
        config={},
        parts=parts,
    )
    commit_save(saves, 0, manifest)
    return manifest


def exported(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a folder as the library reads them."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in safetensors.torch.load_file(file).items()}


def assert_same_bytes(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got[name].view(BITS[tensor.dtype]), tensor.view(BITS[tensor.dtype])), name


@pytest.mark.parametrize("num_files", [1, 2, 6])
@pytest.mark.parametrize(
    ("stored", "precision", "dtype"),
    [
        (BF16, Precision.BF16, None),  # the working copy as it came: what has no lower half is no tie
        (BF16, Precision.FP32, ExportDtype.BF16),
        (FP32, Precision.BF16, ExportDtype.FP32),  # through working copy and residual
        (FP32, Precision.FP32, None),
        (FP16, Precision.BF16, ExportDtype.FP32),
    ],
)
def test_the_same_bytes_come_out(
    tmp_path: Path,
    stored: torch.dtype,
    precision: Precision,
    dtype: ExportDtype | None,
    num_files: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_state, "LOAD_ELEMENTS", 1000)
    (tmp_path / "in").mkdir()
    weights = random_folder(tmp_path / "in", model_layout(), stored, num_files)
    with open_shards(precision, 3) as shards:
        shards.load(WeightFolder.open(tmp_path / "in"))
        manifest = save(shards, tmp_path, precision)
    export_save(save_folder(tmp_path, 0), manifest, tmp_path / "out", dtype, file_bytes=9000)
    as_fp32 = {name: weight.float() for name, weight in weights.items()}
    if precision is Precision.BF16:  # of what is frozen the working copy is all there is
        as_fp32["gate"] = to_working(as_fp32["gate"]).float()
    assert_same_bytes(exported(tmp_path / "out"), weights if stored is BF16 else as_fp32)


class _Noting:
    """A weight source that records every read, to show how much was asked for at once."""

    def __init__(self, folder: WeightFolder) -> None:
        self._folder = folder
        self.reads: list[tuple[str, int, int]] = []

    def read(self, name: str, start: int, stop: int) -> Tensor:
        self.reads.append((name, start, stop))
        return self._folder.read(name, start, stop)


def test_an_import_reads_everything_once_and_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a parameter; benchmarks/import_export.py measures memory at real sizes."""
    monkeypatch.setattr(shard_state, "LOAD_ELEMENTS", 1000)
    weights = random_folder(tmp_path, model_layout(), FP32, 2)
    source = _Noting(WeightFolder.open(tmp_path))
    with open_shards(Precision.BF16, 3) as shards:
        shards.load(source)
    assert max(stop - start for _, start, stop in source.reads) == 1000
    counts = {name: torch.zeros(weight.numel(), dtype=torch.int32) for name, weight in weights.items()}
    for name, start, stop in source.reads:
        counts[name][start:stop] += 1
    assert all((count == 1).all() for count in counts.values())


def test_every_bf16_that_is_no_nan_comes_out_as_it_was(tmp_path: Path) -> None:
    """All 2^16, though masters are rounded to working copies with ties up."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(BF16)
    safetensors.torch.save_file({"all": every}, tmp_path / SINGLE_NAME)
    masters = WeightFolder.open(tmp_path).read("all", 0, every.numel())
    working, residual = split(masters)
    numbers = ~every.isnan()
    assert numbers.sum() == 65536 - 2 * 127
    assert torch.equal(working.view(torch.int16)[numbers], every.view(torch.int16)[numbers])
    assert not residual.any()
    assert working[~numbers].isnan().all()
