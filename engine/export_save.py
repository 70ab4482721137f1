"""Exports a save as a Hugging Face folder: the working copy as it is, or the exact FP32 masters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatrain_ray.engine.working_copy import join, to_working
from megatrain_ray.io.blob_store import FileStore
from megatrain_ray.io.export import FILE_BYTES, ExportDtype, ExportTensor, write_model_folder
from megatrain_ray.io.manifest import Manifest
from megatrain_ray.io.pieces import Piece
from megatrain_ray.io.save_reader import SaveReader
from megatrain_ray.io.weight_map import CheckpointTensor, WeightMap

READ_ELEMENTS = 8 << 20  # at most 64 MiB at once: working copy, residual and master


def export_save(
    save_folder: Path,
    manifest: Manifest,
    out_dir: Path,
    dtype: ExportDtype | None = None,
    file_bytes: int = FILE_BYTES,
    copies: Sequence[Path] = (),
    names: WeightMap | None = None,
    rest: Sequence[ExportTensor] = (),
) -> None:
    """Writes `out_dir`; tied parameters once. `dtype` None: the working copy's. `file_bytes`: of one file at most.
    `copies`: files that go with the model. `names`: what a checkpoint calls parameters, and how it cuts them. `rest`:
    tensors that are no part of the save.

    Raises ConfigError unless `out_dir` is new or empty, MegatrainError naming the blob when the save is damaged, and
    when writing fails. There is no `out_dir` then.
    """
    with asyncio.Runner() as runner:
        values = _SavedValues(save_folder, manifest, runner)
        chosen = dtype or (ExportDtype.BF16 if values.is_split else ExportDtype.FP32)
        tensors = [
            ExportTensor(t.name, t.shape, partial(values.tensor, layer.name, p.start + t.offset, t, chosen))
            for layer in manifest.layers
            for p in layer.parameters
            if p.tied_to is None
            for t in (names or {}).get(p.name) or [CheckpointTensor.whole(p.name, p.shape)]
        ]
        write_model_folder(
            out_dir, [*tensors, *rest], chosen, manifest.model, manifest.generation_config, file_bytes, copies
        )


class _SavedValues:
    """The weights of a save in either type, whatever the precision of the run."""

    def __init__(self, save_folder: Path, manifest: Manifest, runner: asyncio.Runner) -> None:
        self.is_split = "residual" in manifest.itemsize
        self._num_trained = {layer.name: layer.num_trained for layer in manifest.layers}
        self._reader = SaveReader(FileStore(save_folder), manifest)
        self._runner = runner

    def tensor(self, layer: str, start: int, tensor: CheckpointTensor, dtype: ExportDtype) -> Iterator[memoryview]:
        """The bytes of a checkpoint's tensor whose elements lie in a layer from the logical position `start` on."""
        if tensor.is_contiguous:
            yield from self.chunks(layer, start, tensor.numel, dtype)
            return
        read = self._working if dtype is ExportDtype.BF16 else self._master
        values = read(layer, start, start + tensor.numel)
        yield _bytes_of(values.as_strided(tensor.shape, tensor.stride).contiguous().view(-1))

    def chunks(self, layer: str, start: int, size: int, dtype: ExportDtype) -> Iterator[memoryview]:
        """The bytes of `size` elements of a layer from the logical position `start` on."""
        for first in range(start, start + size, READ_ELEMENTS):
            last = min(first + READ_ELEMENTS, start + size)
            read = self._working if dtype is ExportDtype.BF16 else self._master
            yield _bytes_of(read(layer, first, last))

    def _working(self, layer: str, start: int, stop: int) -> Tensor:
        if self.is_split:
            return self._read(layer, "working", start, stop, torch.bfloat16)
        return to_working(self._master(layer, start, stop))

    def _master(self, layer: str, start: int, stop: int) -> Tensor:
        if self.is_split and start >= self._num_trained[layer]:
            return self._working(layer, start, stop).float()  # frozen: a parameter is so wholly or not at all
        if self.is_split:
            residual = self._read(layer, "residual", start, stop, torch.int16)
            return join(self._working(layer, start, stop), residual)
        return self._read(layer, "master", start, stop, torch.float32)

    def _read(self, layer: str, kind: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        values = torch.empty(stop - start, dtype=dtype)
        self._runner.run(self._reader.read([Piece(layer, kind, start, stop, [_bytes_of(values)])]))
        return values


def _bytes_of(values: Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data
