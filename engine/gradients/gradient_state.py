"""Tracks where a layer's gradient is in a step: its state, and the device regions that gradients occupy in turn.

```text
EMPTY ─► ALLOCATED ─► ACCUMULATING ─┬─► OFFLOADED ─► RELOADING ─► RELOADED ─► RELEASED
                        │      ▲    └─► DEFERRED ──┬─► OFFLOADED
                        ▼      │                   └─► RELEASED
         PARTIAL_OFFLOADED ─► LOADING_PARTIAL
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import NamedTuple, TypeVar

import torch

from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.gradients.gradient_offloader import LoadGradient, LoadMomentum
from megatrain_ray.engine.plan.residency import regions_of
from megatrain_ray.errors import DeadlineError, MegatrainError


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
    """Tracks the gradient of one layer, and asserts every change of its state."""

    def __init__(self, layer_name: str) -> None:
        self.state = GradientState.EMPTY
        self.accumulator: Accumulator | None = None  # its device memory from ALLOCATED on, except while offloaded
        self.load: LoadGradient | None = None  # the last request to load it from the host
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
        """Return its device memory and drop the reference to it, so that it can be freed."""
        assert self.accumulator is not None  # by its state
        flat, self.accumulator = self.accumulator.flat, None
        return flat


Load = TypeVar("Load", LoadGradient, LoadMomentum)


class GradientSlots:
    """Allocates device regions that layers' gradients occupy in turn (`regions_of`). Compute thread only."""

    def __init__(
        self, device: Device, sizes_bytes: Sequence[int], needed: Mapping[int, int], timeout_s: float, *, poison: bool
    ) -> None:
        """Allocate the regions.

        sizes_bytes: size of each region.
        needed: bytes of the gradient of each layer that uses a region here, in the order of a backward.
        timeout_s: limit of the wait for a region.
        """
        self._device = device
        self._timeout_s = timeout_s
        self._poison = poison
        self._regions = [device.allocate(num_bytes) for num_bytes in sizes_bytes]
        self._index = regions_of(list(needed), list(needed.values()), sizes_bytes)
        self._empty: list[Future[Event] | None] = [None] * len(self._regions)

    def allocate(self, layer: int, num_bytes: int) -> torch.Tensor:
        """Return the layer's region for writing. Waits until the gradient that was there has left."""
        index = self._index[layer]
        if (emptied := self._empty[index]) is not None:
            wait_for(self._device, emptied, "d2h", self._timeout_s)
        if self._poison:
            self._regions[index].fill_(0xFF)
        return self._regions[index][:num_bytes]

    def load(self, kind: type[Load], layer: int, num_bytes: int) -> Load:
        """Return a request of this kind that fills the layer's region from the host."""
        index = self._index[layer]
        return kind(layer, self._regions[index][:num_bytes], self._empty[index], Future())

    def release(self, layer: int) -> Future[Event]:
        """Let the layer's region be reused. The caller sets the future to the event after which it is empty."""
        future: Future[Event] = Future()
        self._empty[self._index[layer]] = future
        return future

    def reset(self) -> None:
        """Mark all regions as empty. Call between steps, when every gradient has left."""
        self._empty = [None] * len(self._regions)


def wait_for(device: Device, future: Future[Event], cause: str, timeout_s: float) -> None:
    """Block the compute thread until a transfer is submitted, and the compute stage until it has ended.

    cause: cause of the exposed time.

    Raises DeadlineError after `timeout_s`.
    """
    with device.exposed(cause):
        try:
            event = future.result(timeout_s)
        except TimeoutError:
            raise DeadlineError(f"a gradient did not move ({cause}) within {timeout_s:.0f} s") from None
    device.wait(event, cause)
