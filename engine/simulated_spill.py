"""Optimizer state that comes from disk and goes back, on the clocks of a simulated step: what SpillRing does."""

from __future__ import annotations

from collections.abc import Callable

from megatrain_ray.engine.layout import ModelLayout
from megatrain_ray.engine.plan import Plan
from megatrain_ray.trace import Op, Stage

Run = Callable[..., float]  # Clocks.run: when an operation of a stage ends that begins after some times


class SimulatedSpill:
    """Slots that spilled layers take in turn. The disk does one thing after the other, as fast as all of it."""

    def __init__(self, plan: Plan, layout: ModelLayout, run: Run) -> None:
        self._run = run
        spilled = plan.spilled_layers
        self._order = [layer for layer in plan.layer_order if layer in spilled]
        self._num_bytes = {i: layout.layers[i].trained.size * plan.precision.state_bytes for i in self._order}
        self._there_s: dict[int, float] = {}  # when the layers that slots hold had been read
        self._num_slots = min(plan.state_slots, len(self._order))

    def bring(self, layer: int) -> float:
        """When the layer is in memory; 0 for one that always is."""
        if layer not in self._num_bytes:
            return 0.0
        if not self._there_s:  # the first update: nothing was read before
            for first in self._order[: self._num_slots]:
                self._read(first, 0.0)
        return self._there_s[layer]

    def leave(self, layer: int, updated_s: float) -> None:
        """After its update it is written, and the slot takes the layer that comes after those in the others."""
        if layer not in self._num_bytes:
            return
        del self._there_s[layer]
        written_s = self._run(Stage.DISK, Op("write", layer, num_bytes=self._num_bytes[layer]), updated_s)
        coming = (self._order.index(layer) + self._num_slots) % len(self._order)
        self._read(self._order[coming], written_s)

    def _read(self, layer: int, after_s: float) -> None:
        self._there_s[layer] = self._run(Stage.DISK, Op("read", layer, num_bytes=self._num_bytes[layer]), after_s)
