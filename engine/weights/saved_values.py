"""Reads a save: weights by parameter name, for an export, and everything into a run's state.

Layers that were divided differently are matched by their parameters, ranges of experts by their place in the whole
parameter. Moments of another type than the state's are converted: to FP32 exactly, to bf16 by one rounding to nearest
(their updates round them stochastically).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatrain_ray.engine.layout.expert_names import place_in_whole
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.split_master import join, to_working
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.checkpoints.weight_map import CheckpointTensor
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype
from megatrain_ray.io.saves.manifest import WIDE_KIND, LayerEntry, Manifest
from megatrain_ray.io.saves.save_folder import read_pieces
from megatrain_ray.io.saves.save_reader import SaveReader
from megatrain_ray.io.saves.save_writer import Piece
from megatrain_ray.io.storage.blob_store import FileStore

READ_ELEMENTS = 8 << 20  # at most 64 MiB in memory at once: working copy, residual and master


Read = Callable[[int, int], Tensor]  # returns elements [start, stop) of a flattened parameter


class ExportValues(Protocol):
    """Provides the values of an export: `SavedValues`, or values computed from them (`MergedValues`)."""

    def read(self, name: str, start: int, stop: int, dtype: ExportDtype) -> Tensor:
        """Return elements [start, stop) of the flattened parameter: 1-D, bf16 or fp32."""


class SavedRange(NamedTuple):
    """Locates elements [first, stop) of a parameter in a save: from `start` of a layer on, in logical coordinates."""

    first: int
    stop: int
    layer: str
    start: int
    is_trained: bool
    fp32: bool  # whether the model reads it in FP32 while others are bf16


def saved_ranges(manifest: Manifest, *, with_left_out: bool) -> dict[str, list[SavedRange]]:
    """Return where a save's parameters lie, by the names of whole parameters.

    with_left_out: include frozen parameters that the save leaves out.
    """
    found: dict[str, list[SavedRange]] = {}
    for layer in manifest.layers:
        for p in layer.parameters:
            is_trained = p.start < layer.num_trained
            if p.tied_to is None and (with_left_out or is_trained or layer.base_crc32 is None):
                name, first = place_in_whole(p.name, p.shape)
                found.setdefault(name, []).append(
                    SavedRange(first, first + math.prod(p.shape), layer.name, p.start, is_trained, p.fp32)
                )
    return found


class SavedValues:
    """Reads parameters of a save. Every error of reading is a MegatrainError that names the blob."""

    def __init__(self, save_folder: Path, manifest: Manifest, runner: asyncio.Runner) -> None:
        self.is_split = "residual" in manifest.itemsize
        self._ranges = saved_ranges(manifest, with_left_out=False)
        self._reader = SaveReader(FileStore(save_folder), manifest)
        self._runner = runner

    @staticmethod
    @contextmanager
    def open(save_folder: Path, manifest: Manifest) -> Iterator[SavedValues]:
        with asyncio.Runner() as runner:
            yield SavedValues(save_folder, manifest, runner)

    @property
    def dtype(self) -> ExportDtype:
        return ExportDtype.BF16 if self.is_split else ExportDtype.FP32

    def holds(self, name: str) -> bool:
        return name in self._ranges

    def read(self, name: str, start: int, stop: int, dtype: ExportDtype) -> Tensor:
        """Return elements [start, stop) of the flattened parameter: 1-D. Raises MegatrainError if some are missing."""
        read = self._working if dtype is ExportDtype.BF16 else self._master
        found = []
        for place in self._ranges[name]:
            first, last = max(start, place.first), min(stop, place.stop)
            if first < last:
                found.append(read(place, place.start + first - place.first, place.start + last - place.first))
        if sum(map(len, found)) < stop - start:
            raise MegatrainError(f"the save does not hold all of {name}, elements {start} to {stop}")
        return torch.cat(found) if len(found) > 1 else found[0]

    def _working(self, place: SavedRange, start: int, stop: int) -> Tensor:
        if self.is_split and (place.is_trained or not place.fp32):
            return self._read(place.layer, "working", start, stop, torch.bfloat16)
        return to_working(self._master(place, start, stop))

    def _master(self, place: SavedRange, start: int, stop: int) -> Tensor:
        if place.fp32 and not place.is_trained:
            return self._read(place.layer, WIDE_KIND, start, stop, torch.float32)
        if self.is_split and not place.is_trained:
            return self._working(place, start, stop).float()
        if self.is_split:
            residual = self._read(place.layer, "residual", start, stop, torch.int16)
            return join(self._working(place, start, stop), residual)
        return self._read(place.layer, "master", start, stop, torch.float32)

    def _read(self, layer: str, kind: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        values = torch.empty(stop - start, dtype=dtype)
        self._runner.run(self._reader.read([Piece(layer, kind, start, stop, [bytes_of(values)])]))
        return values


def chunks(pieces: Sequence[tuple[Read, CheckpointTensor]], dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield the bytes of a checkpoint's tensor, which consists of pieces of parameters.

    One that holds a piece of one parameter in its order is read part by part, any other as a whole. What no piece
    covers is zero, as Transformers pads a table of tokens.
    """
    read, first = pieces[0]
    if len(pieces) == 1 and first.is_contiguous:
        for start in range(first.offset, first.stop, READ_ELEMENTS):
            yield bytes_of(read(start, min(start + READ_ELEMENTS, first.stop)))
        return
    whole = torch.zeros(math.prod(first.place.shape), dtype=dtype)
    for read, piece in pieces:
        values = read(piece.offset, piece.stop).as_strided(piece.shape, piece.stride)
        whole.as_strided(piece.shape, piece.place.stride, piece.place.offset).copy_(values)
    yield bytes_of(whole)


def bytes_of(values: Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data


CONVERTED_BYTES = 64 << 20  # bytes of state that are converted at a time
MOMENTS = {2: torch.bfloat16, 4: torch.float32}  # bytes of an element → type


def restore_pieces(save_folder: Path, manifest: Manifest, pieces: Sequence[Piece]) -> None:
    """Fill the writable host buffers of each piece from the save. Raises what `read_pieces` raises."""
    others = [piece for piece in pieces if _is_converted(piece, manifest)]
    asyncio.run(read_pieces(save_folder, manifest, (piece for piece in pieces if not _is_converted(piece, manifest))))
    for piece in others:
        for part in piece.cut(CONVERTED_BYTES):
            _convert(save_folder, manifest, part)


def as_saved(pieces: Iterable[Piece], manifest: Manifest, layout: ModelLayout) -> list[Piece]:
    """Return the same elements as pieces of the save's layers, if blocks were divided differently when it was made.

    layout: the layout whose layers the pieces belong to.

    Raises MegatrainError for a parameter that the save does not hold completely.
    """
    if names_of(manifest.layers) == [[p.name for p in layer.segments] for layer in layout.layers]:
        return list(pieces)
    return list(_found(pieces, manifest, layout))


def names_of(layers: Iterable[LayerEntry]) -> list[list[str]]:
    return [[parameter.name for parameter in layer.parameters] for layer in layers]


def _found(pieces: Iterable[Piece], manifest: Manifest, layout: ModelLayout) -> Iterator[Piece]:
    theirs = saved_ranges(manifest, with_left_out=True)
    ours = {layer.name: layer for layer in layout.layers}
    for piece in pieces:
        position = 0
        for segment in ours[piece.layer].segments:
            start, stop = max(piece.start, position), min(piece.stop, position + segment.numel)
            if start < stop:
                name, first = place_in_whole(segment.name, segment.shape)
                missing = stop - start  # ranges of one parameter do not overlap
                for place in theirs.get(name, ()):
                    shift = place.first - first + position  # from the parameter's elements to the piece's
                    common = max(start, shift), min(stop, shift + place.stop - place.first)
                    if common[0] < common[1]:
                        missing -= common[1] - common[0]
                        yield piece.part(*common, place.layer, place.start + common[0] - shift)
                if missing:
                    raise MegatrainError(f"the save does not hold {missing} of the elements of {segment.name}")
            position += segment.numel


def _is_converted(piece: Piece, manifest: Manifest) -> bool:
    return piece.kind in ("m", "v") and piece.itemsize != manifest.itemsize[piece.kind]


def _convert(save_folder: Path, manifest: Manifest, part: Piece) -> None:
    itemsize = manifest.itemsize[part.kind]
    saved = torch.empty((part.stop - part.start) * itemsize, dtype=torch.uint8)
    asyncio.run(read_pieces(save_folder, manifest, [part._replace(buffers=[saved.numpy().data])]))
    values, start = saved.view(MOMENTS[itemsize]), 0
    for buffer in part.buffers:
        state = torch.frombuffer(buffer, dtype=MOMENTS[part.itemsize])
        state.copy_(values[start : start + state.numel()])
        start += state.numel()
