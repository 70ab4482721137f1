"""What a save holds, brought into state: moments of another type than the state's are converted on the way, to FP32
exactly, to bf16 once to nearest (their updates round them stochastically)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch

from megatrain_ray.io.manifest import Manifest
from megatrain_ray.io.pieces import Piece
from megatrain_ray.io.save import read_pieces

CONVERTED_BYTES = 64 << 20  # of state at a time
MOMENTS = {2: torch.bfloat16, 4: torch.float32}  # by bytes of an element


def restore_pieces(save_folder: Path, manifest: Manifest, pieces: Sequence[Piece]) -> None:
    """Fills the writable buffers of each piece, which are on the host. Raises what `read_pieces` does."""
    others = [piece for piece in pieces if _is_converted(piece, manifest)]
    asyncio.run(read_pieces(save_folder, manifest, (piece for piece in pieces if not _is_converted(piece, manifest))))
    for piece in others:
        for part in piece.cut(CONVERTED_BYTES):
            _convert(save_folder, manifest, part)


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
