"""WorkingArena: where the working copies in host memory lie, one after the other."""

from __future__ import annotations

from torch import Tensor

from megatrain_ray.engine.layout import ModelLayout
from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.residency import FragmentId
from megatrain_ray.engine.seams import WeightPart


class WorkingArena:
    """Of the layers that stream and are not on disk."""

    def __init__(self, plan: Plan, layout: ModelLayout, working: Tensor) -> None:
        """`working`: 1-D, of ModelLayout.size_among these layers."""
        self._layout = layout
        self._starts = layout.starts_among(plan.weights_on_host)
        self._working = working

    def of_layer(self, layer: int) -> Tensor:
        """1-D, padded."""
        return self._working[self._starts[layer] :][: self._layout.layers[layer].size]

    def part(self, fragment: FragmentId) -> WeightPart:
        """The fragment, which is all of one part."""
        span = self._layout.layers[fragment.layer].fragments[fragment.index]
        return WeightPart(span.start, self.of_layer(fragment.layer)[span.start : span.stop])
