"""WorkingArena: where the working copies in host memory lie, one after the other."""

from __future__ import annotations

from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import Span
from megatrain_ray.engine.layout.model_layout import ModelLayout, WeightPart
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId


class WorkingArena:
    """Of the layers that stream and are not on disk: what this host has of them."""

    def __init__(self, plan: Plan, layout: ModelLayout, working: Tensor) -> None:
        """`working`: 1-D, of ModelLayout.size_among these layers."""
        self._layout = layout
        self._starts = layout.starts_among(plan.weights_on_host)
        self._working = working

    def of_layer(self, layer: int) -> Tensor:
        """1-D, padded: all that the host has of it."""
        return self._working[self._starts[layer] :][: self._layout.shares[layer].size]

    def part(self, fragment: FragmentId) -> WeightPart:
        """The fragment, which is all of one part, where there is one host."""
        return self.of_span(fragment.layer, self._layout.layers[fragment.layer].fragments[fragment.index])

    def of_span(self, layer: int, span: Span) -> WeightPart:
        """Of what the host has of the layer; trained or frozen where that is not all."""
        start = self._layout.shares[layer].position(span.start)
        return WeightPart(span.start, self.of_layer(layer)[start : start + span.size])
