"""Where gradients are on the device: regions that layers take in turn. Compute thread only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import torch

from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.gradients.gradient_offloader import Fetch
from megatrain_ray.engine.plan.gradient_slots import regions_of
from megatrain_ray.errors import DeadlineError


class GradientSlots:
    """Regions that layers' gradients occupy in turn (`regions_of`)."""

    def __init__(
        self, device: Device, sizes_bytes: Sequence[int], needed: Mapping[int, int], timeout_s: float, *, poison: bool
    ) -> None:
        """`needed`: bytes of each layer that has a gradient here, in the order of a backward. `timeout_s`: of waiting
        for a region."""
        self._device = device
        self._timeout_s = timeout_s
        self._poison = poison
        self._regions = [device.allocate(num_bytes) for num_bytes in sizes_bytes]
        self._index = regions_of(list(needed), list(needed.values()), sizes_bytes)
        self._empty: list[Future[Event] | None] = [None] * len(self._regions)

    def take(self, layer: int, num_bytes: int) -> torch.Tensor:
        """The layer's region, to be written once what left it last has left."""
        index = self._index[layer]
        future = self._empty[index]
        if future is not None:
            wait_for(self._device, future, "d2h", self._timeout_s)
        if self._poison:
            self._regions[index].fill_(0xFF)
        return self._regions[index][:num_bytes]

    def fetch(self, layer: int, num_bytes: int) -> Fetch:
        """A request to fill the layer's region from the host."""
        index = self._index[layer]
        return Fetch(layer, self._regions[index][:num_bytes], self._empty[index], Future())

    def leave(self, layer: int) -> Future[Event]:
        """The region's gradient may go; the future gets the event after which it is empty."""
        future: Future[Event] = Future()
        self._empty[self._index[layer]] = future
        return future

    def reset(self) -> None:
        """Between steps: everything has left."""
        self._empty = [None] * len(self._regions)


def wait_for(device: Device, future: Future[Event], cause: str, timeout_s: float) -> None:
    """The compute thread waits until a transfer is submitted, the compute stage until it is done."""
    with device.exposed(cause):
        try:
            event = future.result(timeout_s)
        except FutureTimeout:
            raise DeadlineError(f"a gradient did not move ({cause}) within {timeout_s:.0f} s") from None
    device.wait(event, cause)
