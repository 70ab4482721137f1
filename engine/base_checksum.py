"""Checksums of what is frozen, where a save leaves it out: by them a restore knows that it loaded the same again."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from megatrain_ray.engine.layout import FlatLayout, ModelLayout

CHUNK_BYTES = 1 << 20  # stays in a core's cache


def frozen_checksums(layout: ModelLayout, working: Tensor, num_threads: int) -> tuple[int | None, ...]:
    """zlib's CRC-32 of the bytes of each layer's frozen parameters, one after the other; None where it has none.

    `working`: 1-D, the whole model's working copies at ModelLayout.starts. The sums depend neither on padding nor on
    the number of shards.
    """

    def of(index: int) -> int | None:
        layer, start = layout.layers[index], layout.starts[index]
        return _crc32(layer, working[start : start + layer.size]) if layer.num_trained < layer.logical_size else None

    with ThreadPoolExecutor(num_threads) as pool:
        return tuple(pool.map(of, range(len(layout.layers))))


def _crc32(layer: FlatLayout, flat: Tensor) -> int:
    crc32 = 0
    for segment in layer.owned:
        if not segment.group.trained:
            values = flat[segment.start : segment.stop].view(torch.uint8).numpy().data
            for first in range(0, len(values), CHUNK_BYTES):
                crc32 = zlib.crc32(values[first : first + CHUNK_BYTES], crc32)
    return crc32
