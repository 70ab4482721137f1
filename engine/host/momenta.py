"""Finds the first moments of a layer in host memory, for Muon's orthogonalisation. They are only read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import Span
from megatrain_ray.engine.layout.shard_layout import ShardLayout


class MomentumPart(NamedTuple):
    """Holds the part of the requested moments that one shard keeps.

    start: first element, counted from the beginning of what was requested.
    values: fp32, 1-D.
    """

    start: int
    values: Tensor


class Momenta:
    """Finds first moments in the state of all shards."""

    def __init__(self, layouts: Sequence[ShardLayout], tensors: Sequence[Tensor]) -> None:
        """Use the first moments of these shards.

        tensors: m of each shard, 1-D fp32 of ShardLayout.size elements.
        """
        self._shards = tuple(zip(layouts, tensors, strict=True))

    def of(self, layer: int, span: Span) -> list[MomentumPart]:
        """Return parts that together hold the first moments of a span of the layer.

        span: in padded coordinates of the layer. An empty span gives one part without elements, since a fetch waits for
            the end of the last part's copy.
        """
        found = []
        for layout, m in self._shards:
            held, own = layout.spans[layer], m[layout.slice(layer)]
            start, stop = max(held.start, span.start), min(held.stop, span.stop)
            if start < stop:
                found.append(MomentumPart(start - span.start, own[start - held.start : stop - held.start]))
        return found or [MomentumPart(0, self._shards[0][1][:0])]
