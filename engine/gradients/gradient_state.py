"""Names the states of a layer's gradient in a step, and asserts every change of them.

```text
EMPTY ─► ALLOCATED ─► ACCUMULATING ─┬─► OFFLOADED ─► RELOADING ─► RELOADED ─► RELEASED
                        │      ▲    └─► DEFERRED ──┬─► OFFLOADED
                        ▼      │                   └─► RELEASED
         PARTIAL_OFFLOADED ─► LOADING_PARTIAL
```
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import torch

from megatrain_ray.engine.gradients.gradient_offloader import LoadGradient
from megatrain_ray.errors import MegatrainError


class GradientState(Enum):
    """Says which memory holds a layer's gradient."""

    EMPTY = "no memory: the step has not contributed to it"
    ALLOCATED = "device memory without values: the next contribution begins the sum"
    ACCUMULATING = "device memory: the sum of the contributions so far"
    PARTIAL_OFFLOADED = "the slab, after a copy that was requested: the sum so far"
    LOADING_PARTIAL = "the slab, and device memory after a copy that was requested: the sum so far"
    DEFERRED = "device memory: complete, until the scale of the clipped update is known"
    OFFLOADED = "the slab, after a copy that was requested: complete"
    RELOADING = "the slab, and device memory after a copy that was requested: complete, for Muon"
    RELOADED = "the slab and device memory: complete, Muon reads it"
    RELEASED = "no device memory after the work submitted so far"


class GradientStateError(MegatrainError):
    """Reports that a gradient was used against its protocol: a bug in the engine, never in the input."""


class Accumulator(NamedTuple):
    """Holds a layer's gradient as a padded 1-D tensor, and a view of it for each parameter, by name."""

    flat: torch.Tensor
    views: Mapping[str, torch.Tensor]


class LayerGradient:
    """Tracks the gradient of one layer.

    accumulator: its device memory from ALLOCATED on, except while it is offloaded.
    load: the last request to load it from the host.
    """

    def __init__(self, layer_name: str) -> None:
        self.state = GradientState.EMPTY
        self.accumulator: Accumulator | None = None
        self.load: LoadGradient | None = None
        self._layer_name = layer_name

    def expect(self, action: str, *states: GradientState) -> None:
        """Raise GradientStateError unless the gradient is in one of the states that the action needs."""
        if self.state not in states:
            expected = " or ".join(state.name for state in states)
            raise GradientStateError(
                f"gradient of {self._layer_name} is {self.state.name}; expected {expected} to {action}"
            )

    def to(self, state: GradientState, action: str, *expected: GradientState) -> None:
        """Change the state. Raises as `expect`."""
        self.expect(action, *expected)
        self.state = state

    def pop_flat(self) -> torch.Tensor:
        """Return its device memory, and drop the reference to it."""
        assert self.accumulator is not None  # by its state
        flat, self.accumulator = self.accumulator.flat, None
        return flat
