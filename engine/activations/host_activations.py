"""Activations that wait on the host, in pinned memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.layer_calls.layer_call import bytes_of
from megatrain_ray.errors import MegatrainError
from megatrain_ray.virtual_clock import Op, Stage


@dataclass
class OnHost:
    """What one layer left of one micro-batch. `places`: where each storage's bytes are. `event`: of the last copy, out
    or in."""

    device: Device
    op: Op
    storages: list[torch.UntypedStorage]
    places: list[torch.Tensor]
    event: Event
    is_back: bool = False

    def gone(self) -> Event:
        """After which nothing reads its storages."""
        return self.event

    def fetch(self) -> None:
        """Takes memory for it, which is filled. Idempotent."""
        if self.is_back:
            return
        for storage, place in zip(self.storages, self.places, strict=True):
            storage.resize_(place.nbytes)
        after = [self.device.record(), self.event]  # the first: of memory that something submitted before may use
        pairs = [(bytes_of(storage), place) for storage, place in zip(self.storages, self.places, strict=True)]
        self.event, self.is_back = self.device.copy_all(Stage.H2D, pairs, self.op, after), True

    def back(self) -> Event:
        """After which its storages have what they had."""
        return self.event


class HostPlaces:
    """Taken from the memory's start on until all of it is free again."""

    def __init__(self, device: Device, planned_bytes: int, held_bytes: int) -> None:
        """`held_bytes`: of memory, which is taken in turn where the plan has more."""
        self._device = device
        self._planned_bytes = planned_bytes
        self._memory = torch.empty(held_bytes, dtype=torch.uint8)
        if held_bytes:
            device.pin(self._memory)
        self.clear()

    def clear(self) -> None:
        self._taken_bytes = self._end = 0

    def send(self, op: Op, storages: list[torch.UntypedStorage]) -> OnHost:
        """Behind what was submitted."""
        places = [self._take(storage.nbytes()) for storage in storages]
        pairs = [(place, bytes_of(storage)) for storage, place in zip(storages, places, strict=True)]
        event = self._device.copy_all(Stage.D2H, pairs, op, [self._device.record()])
        return OnHost(self._device, op, storages, places, event)

    def _take(self, num_bytes: int) -> torch.Tensor:
        """1-D uint8. Raises MegatrainError beyond what the plan has."""
        self._taken_bytes += num_bytes
        if self._taken_bytes > self._planned_bytes:
            raise MegatrainError(
                f"activations take {self._taken_bytes} bytes of host memory, the plan has {self._planned_bytes} for "
                "them: micro-batches are larger than planned"
            )
        start = self._end if self._end + num_bytes <= self._memory.nbytes else 0
        self._end = start + num_bytes
        return self._memory[start : self._end]
