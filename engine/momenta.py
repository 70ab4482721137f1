"""Momenta: where the first moments of a model lie on the host, for whoever orthogonalises: they are only read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megatrain_ray.engine.shard_layout import ShardLayout


class MomentumPart(NamedTuple):
    """What one shard keeps of a layer: `values` (fp32, 1-D) from element `start` of its padded trained part on."""

    start: int
    values: Tensor


class Momenta:
    """Over the state of all shards."""

    def __init__(self, layouts: Sequence[ShardLayout], tensors: Sequence[Tensor]) -> None:
        """`tensors`: m of each shard, 1-D fp32 of ShardLayout.size."""
        self._shards = tuple(zip(layouts, tensors, strict=True))

    def of(self, layer: int) -> list[MomentumPart]:
        """Together the whole trained part of the layer."""
        return [
            MomentumPart(layout.spans[layer].start, m[layout.slice(layer)])
            for layout, m in self._shards
            if layout.spans[layer].size
        ]
