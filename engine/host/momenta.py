"""Momenta: where the first moments of a model lie on the host, for whoever orthogonalises: they are only read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import Span
from megatrain_ray.engine.layout.shard_layout import ShardLayout


class MomentumPart(NamedTuple):
    """What one shard keeps of what is asked for: `values` (fp32, 1-D) from element `start` of that on."""

    start: int
    values: Tensor


class Momenta:
    """Over the state of all shards."""

    def __init__(self, layouts: Sequence[ShardLayout], tensors: Sequence[Tensor]) -> None:
        """`tensors`: m of each shard, 1-D fp32 of ShardLayout.size."""
        self._shards = tuple(zip(layouts, tensors, strict=True))

    def of(self, layer: int, span: Span) -> list[MomentumPart]:
        """Together those of the span, which is in padded coordinates of the layer; of an empty one a part without
        elements, since the end of the last part's copy is what a fetch waits for."""
        found = []
        for layout, m in self._shards:
            held, own = layout.spans[layer], m[layout.slice(layer)]
            start, stop = max(held.start, span.start), min(held.stop, span.stop)
            if start < stop:
                found.append(MomentumPart(start - span.start, own[start - held.start : stop - held.start]))
        return found or [MomentumPart(0, self._shards[0][1][:0])]
