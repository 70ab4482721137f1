"""Computes checksums of frozen parameters that a save leaves out.

With them a restore or a merge verifies that it has the same values again. The checksum is zlib's CRC-32 of a layer's
frozen parameters in the form in which they stream, one after the other.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from megatrain_ray.engine.layout.expert_names import place_in_whole
from megatrain_ray.engine.layout.flat_layout import FlatLayout, Segment
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.split_master import to_working
from megatrain_ray.engine.weights.saved_values import READ_ELEMENTS, bytes_of
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.io.saves.manifest import Manifest, ParameterEntry


def frozen_checksums(
    layout: ModelLayout, working_of: Callable[[int], Tensor], num_threads: int
) -> tuple[int | None, ...]:
    """Return the checksum of each layer's frozen parameters in memory; None for a layer without frozen parameters.

    It depends neither on padding nor on the number of shards. `working_of` returns a layer's working copy on the host:
    1-D, padded.
    """

    def of(layer: int) -> int | None:
        if not (frozen := _frozen(layout.layers[layer])):
            return None
        flat = working_of(layer)
        return _crc32(flat[segment.start : segment.stop] for segment in frozen)

    with ThreadPoolExecutor(num_threads) as pool:
        return tuple(pool.map(of, range(len(layout.layers))))


def source_checksums(base: WeightSource, manifest: Manifest) -> list[int | None]:
    """Return the checksums of what `base` would load in place of what a save leaves out; None where that is nothing."""
    frozen = [
        [p for p in layer.parameters if p.start >= layer.num_trained and p.tied_to is None] for layer in manifest.layers
    ]
    is_split = "residual" in manifest.itemsize
    return [
        None if layer.base_crc32 is None else _crc32_of_source(base, parameters, is_split=is_split)
        for layer, parameters in zip(manifest.layers, frozen, strict=True)
    ]


def unread_checksums(base: WeightSource, layout: ModelLayout, *, is_split: bool) -> list[int | None]:
    """Return what `frozen_checksums` would return for what `base` loads. `is_split`: whether masters are split.

    It is for runs in which no process holds all of a layer.
    """
    frozen = map(_frozen, layout.layers)
    return [_crc32_of_source(base, segments, is_split=is_split) if segments else None for segments in frozen]


def _crc32_of_source(base: WeightSource, parameters: Sequence[ParameterEntry | Segment], *, is_split: bool) -> int:
    def as_streamed(values: Tensor, *, fp32: bool) -> Tensor:
        return values.contiguous() if fp32 or not is_split else to_working(values)

    return _crc32(as_streamed(values, fp32=p.fp32) for p in parameters for values in _read(base, p))


def _frozen(layer: FlatLayout) -> list[Segment]:
    return [segment for segment in layer.owned if not segment.group.trained]


def _crc32(parts: Iterable[Tensor]) -> int:
    crc32 = 0
    for part in parts:
        crc32 = zlib.crc32(bytes_of(part), crc32)
    return crc32


def _read(base: WeightSource, parameter: ParameterEntry | Segment) -> Iterator[Tensor]:
    name, first = place_in_whole(parameter.name, parameter.shape)
    stop = first + math.prod(parameter.shape)
    for start in range(first, stop, READ_ELEMENTS):
        yield base.read(name, start, min(start + READ_ELEMENTS, stop))
