"""Holds offloaded activations in pinned host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.layer_calls.layer_call import bytes_of
from megatrain_ray.errors import MegatrainError
from megatrain_ray.virtual_clock import Op, Stage


@dataclass
class OnHost:
    """Tracks what one layer left of one micro-batch.

    places: host memory of each storage's bytes.
    event: the last copy, out of the device or back.
    is_reloaded: whether the copy back is submitted.
    """

    device: Device
    op: Op
    storages: list[torch.UntypedStorage]
    places: list[torch.Tensor]
    event: Event
    is_reloaded: bool = False

    def offloaded(self) -> Event:
        """Return the event after which nothing reads its storages."""
        return self.event

    def reload(self) -> None:
        """Allocate device memory for it and submit the copy back. Idempotent."""
        if self.is_reloaded:
            return
        for storage, place in zip(self.storages, self.places, strict=True):
            storage.resize_(place.nbytes)
        after = [self.device.record(), self.event]  # the first: work submitted before may use the memory
        pairs = [(bytes_of(storage), place) for storage, place in zip(self.storages, self.places, strict=True)]
        self.event, self.is_reloaded = self.device.copy_all(Stage.H2D, pairs, self.op, after), True

    def reloaded(self) -> Event:
        """Return the event after which its storages have their contents again."""
        return self.event


class HostBuffer:
    """Allocates pinned host memory from its start on, until `clear` frees all of it at once."""

    def __init__(self, device: Device, planned_bytes: int, held_bytes: int) -> None:
        """Allocate and pin the memory.

        planned_bytes: what activations may take by the plan.
        held_bytes: memory to allocate. If the plan has more, allocations start again at its beginning.
        """
        self._device = device
        self._planned_bytes = planned_bytes
        self._memory = torch.empty(held_bytes, dtype=torch.uint8)
        if held_bytes:
            device.pin(self._memory)
        self.clear()

    def clear(self) -> None:
        self._taken_bytes = self._end = 0

    def send(self, op: Op, storages: list[torch.UntypedStorage]) -> OnHost:
        """Offload `storages` to the host, after all work submitted to the compute stream so far."""
        places = [self._allocate(storage.nbytes()) for storage in storages]
        pairs = [(place, bytes_of(storage)) for storage, place in zip(storages, places, strict=True)]
        event = self._device.copy_all(Stage.D2H, pairs, op, [self._device.record()])
        return OnHost(self._device, op, storages, places, event)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate 1-D uint8 memory. Raises MegatrainError if it exceeds the planned bytes."""
        self._taken_bytes += num_bytes
        if self._taken_bytes > self._planned_bytes:
            raise MegatrainError(
                f"activations take {self._taken_bytes} bytes of host memory, the plan has {self._planned_bytes} for "
                "them: micro-batches are larger than planned"
            )
        start = self._end if self._end + num_bytes <= self._memory.nbytes else 0
        self._end = start + num_bytes
        return self._memory[start : self._end]
