"""Locates the working copies in host memory, which lie one after another."""

from __future__ import annotations

from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import Span
from megatrain_ray.engine.layout.model_layout import ModelLayout, WeightPart
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

    def of_span(self, layer: int, span: Span) -> WeightPart:
        """Return a span (padded) of what the host has of a layer.

        If the host does not have the whole layer, the span must be all trained or all frozen.
        """
        start = self._layout.shares[layer].position(span.start)
        return WeightPart(span.start, self.of_layer(layer)[start : start + span.size])
