"""Simulates when the slab has room for a gradient that passes through it."""

from __future__ import annotations

from collections import deque

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.plan import Plan


class SimulatedSlab:
    """Simulates the part of the slab that gradients pass through; it lies after the gradients that stay in the slab.

    It is used with clipping. Gradients leave in the order in which they came.
    """

    def __init__(self, plan: Plan, layout: ModelLayout) -> None:
        sizes = layout.gradient_bytes(plan.gradients.slab_itemsize, plan.never_in_slab)
        self._sizes = {layer: sizes[layer] for layer in (*plan.deferred_offload_layers, *plan.gradients_on_disk)}
        self._room = plan.gradients.slab_bytes - sum(size for i, size in enumerate(sizes) if i not in self._sizes)
        self._held: deque[int] = deque()
        self._left_s: dict[int, float] = {}

    def take(self, layer: int) -> float:
        """Return from when on there is room for the layer's gradient (s), and take it; 0 for a gradient that stays."""
        if layer not in self._sizes:
            return 0.0
        room_s = 0.0
        while sum(self._sizes[i] for i in (*self._held, layer)) > self._room:
            room_s = max(room_s, self._left_s[self._held.popleft()])
        self._held.append(layer)
        return room_s

    def leave(self, layer: int, at_s: float) -> None:
        """Release the layer's room at a time (s)."""
        self._left_s[layer] = at_s
