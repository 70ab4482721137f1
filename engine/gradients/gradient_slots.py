"""Holds gradients on the device in regions that layers use in turn. Compute thread only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

import torch

from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.gradients.gradient_offloader import LoadGradient, LoadMomentum
from megatrain_ray.engine.plan.residency import regions_of
from megatrain_ray.errors import DeadlineError

Load = TypeVar("Load", LoadGradient, LoadMomentum)


class GradientSlots:
    """Allocates device regions that layers' gradients occupy in turn (`regions_of`)."""

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
        future = self._empty[index]
        if future is not None:
            wait_for(self._device, future, "d2h", self._timeout_s)
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
        except FutureTimeout:
            raise DeadlineError(f"a gradient did not move ({cause}) within {timeout_s:.0f} s") from None
    device.wait(event, cause)
