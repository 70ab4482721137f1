"""Simulates when Muon's momenta arrive, and when its directions are made and leave the device.

It follows engine/gradients/muon_directions.py.
"""

from __future__ import annotations

import torch

from megatrain_ray.engine.layout.model_layout import DIRECTION_BYTES, ModelLayout
from megatrain_ray.engine.optimizer.matrix_parts import largest_part
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.cost.stage_clocks import Clocks, Ring
from megatrain_ray.virtual_clock import Op, Stage


class SimulatedDirections:
    """Simulates Muon's directions of one step after the other, layer by layer."""

    def __init__(self, plan: Plan, layout: ModelLayout, clocks: Clocks) -> None:
        self._layout = layout
        self._num_gpus = plan.hosts.num_gpus
        self._clocks = clocks
        layers = tuple(reversed(layout.with_muon))
        sizes = [largest_part(layout.layers[layer], plan.hosts.num_gpus) for layer in layers]
        self._momenta = Ring(layers, [size * torch.float32.itemsize for size in sizes], plan.slots.momentum_bytes)
        self._directions = Ring(layers, [size * DIRECTION_BYTES for size in sizes], plan.slots.direction_bytes)
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._momenta.begin()
        self._directions.begin()
        self._arrived_s: dict[int, float] = {}

    def fetch_momentum(self, layer: int, after_s: float) -> None:
        op = Op("momentum", layer, num_bytes=self._bytes(layer, torch.float32.itemsize))
        self._arrived_s[layer] = self._clocks.run(Stage.H2D, op, self._momenta.empty(layer), after_s)

    def make(self, layer: int) -> None:
        self._clocks.wait(self._arrived_s.pop(layer), "h2d")
        self._clocks.wait(self._directions.empty(layer), "d2h")
        self._momenta.leave(layer, self._clocks.run(Stage.COMPUTE, Op("orthogonalize", layer)))

    def leave(self, layer: int) -> float:
        """Offload a layer's directions, and return when they are on the host (s)."""
        op = Op("complete", layer, num_bytes=self._bytes(layer, DIRECTION_BYTES))
        end_s = self._clocks.run(Stage.D2H, op, self._clocks.computed_s)
        self._directions.leave(layer, end_s)
        return end_s

    def _bytes(self, layer: int, itemsize: int) -> int:
        """Return the bytes that one GPU moves for the layer: an equal share, as each has of all layers together."""
        return self._layout.layers[layer].trained.size * itemsize // self._num_gpus
