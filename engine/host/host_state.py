"""Locates working copies and first moments in host memory.

The working copies lie one after another. First moments are read for Muon's orthogonalisation only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.model_layout import ModelLayout, WeightPart
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId


class WorkingArena:
    """Locates the working copies of layers that stream and are not on disk, as far as this host has them."""

    def __init__(self, plan: Plan, layout: ModelLayout, working: Tensor) -> None:
        """Compute where each of these layers begins in `working`.

        working: 1-D, ModelLayout.size_among(these layers) elements.
        """
        self._layout = layout
        self._starts = layout.starts_among(plan.weights_on_host)
        self._working = working

    def of_layer(self, layer: int) -> Tensor:
        """Return everything that the host has of a layer: 1-D, padded."""
        return self._working[self._starts[layer] :][: self._layout.shares[layer].size]

    def part(self, fragment: FragmentId) -> WeightPart:
        """Return a fragment as one part. Requires a single host, which has all of it."""
        return self.of_span(fragment.layer, self._layout.layers[fragment.layer].fragments[fragment.index])

    def of_span(self, layer: int, span: ElementRange) -> WeightPart:
        """Return a span (padded) of what the host has of a layer.

        If the host does not have the whole layer, the span must be all trained or all frozen.
        """
        start = self._layout.shares[layer].position(span.start)
        return WeightPart(span.start, self.of_layer(layer)[start : start + span.size])


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

    def of(self, layer: int, span: ElementRange) -> list[MomentumPart]:
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
