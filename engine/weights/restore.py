"""Restores the contents of a save into a run's state.

Layers that were divided differently are matched by their parameters, ranges of experts by their place in the whole
parameter. Moments of another type than the state's are converted: to FP32 exactly, to bf16 by one rounding to nearest
(their updates round them stochastically).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from megatrain_ray.engine.layout.expert_names import place_in_whole
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.weights.saved_values import saved_ranges
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.saves.manifest import LayerEntry, Manifest
from megatrain_ray.io.saves.save_folder import read_pieces
from megatrain_ray.io.saves.save_writer import Piece

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
