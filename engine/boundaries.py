"""Boundary activations that wait on the host: what enters a layer leaves behind its forward and comes back ahead of its
backward. Compute thread only.

The tensors stay what they are, for the model and for autograd alike; their storage is emptied once the copy has left,
and filled again from the copy. That is safe where nothing reads them in between, which the trial forward tells
(private_inputs.py); whoever did would find no memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatrain_ray.engine.device import Device, Event
from megatrain_ray.engine.plan import Plan, Tier
from megatrain_ray.engine.visits import Phase, Visit
from megatrain_ray.errors import MegatrainError
from megatrain_ray.trace import Op, Stage


class Entry(NamedTuple):
    """What one micro-batch brings into one layer."""

    layer: int
    micro_batch: int


@dataclass
class _Away:
    """`places`: where each storage's bytes are on the host. `event`: of the last copy, out or in."""

    storages: list[torch.UntypedStorage]
    places: list[torch.Tensor]
    event: Event
    is_back: bool = False


class BoundaryStore:
    """Places on the host, and what is there now."""

    def __init__(self, plan: Plan, device: Device) -> None:
        self._device = device
        self._on_host = [layer.boundary is Tier.HOST for layer in plan.layers]
        self._memory = torch.empty(plan.boundary_bytes, dtype=torch.uint8)
        device.pin(self._memory)
        self._end = 0
        self._next: dict[Entry, Entry] = {}
        self._away: dict[Entry, _Away] = {}
        self._leaving: Entry | None = None

    def begin(self, visits: Sequence[Visit]) -> None:
        """Before a step of these visits."""
        order = [
            Entry(visit.layer, j)
            for visit in visits
            if visit.phase is Phase.BACKWARD and self._on_host[visit.layer]
            for j in visit.micro_batches
        ]
        self._next = dict(itertools.pairwise(order))
        self._away.clear()
        self._leaving = None
        self._end = 0

    def leave(self, layer: int, micro_batch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Behind the forward of a micro-batch through a layer, which `tensors` entered: nobody reads them until
        `bring_back`. Those of the forward before have left by the time that this one has been computed."""
        if not self._on_host[layer] or not tensors:
            return
        entry = Entry(layer, micro_batch)
        storages = list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())
        places = [self._place(storage.nbytes()) for storage in storages]
        event = self._device.record()
        for storage, place in zip(storages, places, strict=True):
            op = Op("boundary", layer, micro_batch, num_bytes=storage.nbytes())
            event = self._device.copy(Stage.D2H, place, _bytes_of(storage), op, [event])
        self._away[entry] = _Away(storages, places, event)
        self._let_go()
        self._leaving = entry

    def bring_back(self, layer: int, micro_batch: int) -> None:
        """Ahead of the backward: what entered is there again for what is submitted next; what the next backward needs
        is on its way."""
        if not self._on_host[layer]:
            return
        self._let_go()
        entry = Entry(layer, micro_batch)
        self._fetch(entry)
        if entry in self._next:
            self._fetch(self._next[entry])
        if entry in self._away:
            self._device.wait(self._away[entry].event, "h2d")

    def forget(self, layer: int, micro_batch: int) -> None:
        """Behind the backward. The memory is freed with the tensors."""
        self._away.pop(Entry(layer, micro_batch), None)
        if not self._away:  # the next micro-batch, where they come one after the other, has the same places
            self._end = 0

    def _fetch(self, entry: Entry) -> None:
        away = self._away.get(entry)
        if away is None or away.is_back:
            return
        for storage, place in zip(away.storages, away.places, strict=True):
            storage.resize_(place.nbytes)
        after = [self._device.record(), away.event]  # the first: of memory that something submitted before may use
        for storage, place in zip(away.storages, away.places, strict=True):
            op = Op("boundary", entry.layer, entry.micro_batch, num_bytes=place.nbytes)
            after = [self._device.copy(Stage.H2D, _bytes_of(storage), place, op, after)]
        away.event, away.is_back = after[0], True

    def _let_go(self) -> None:
        """What left last frees its memory, for what is submitted next."""
        if self._leaving is None:
            return
        away = self._away[self._leaving]
        self._device.wait(away.event, "d2h")
        for storage in away.storages:
            storage.resize_(0)
        self._leaving = None

    def _place(self, num_bytes: int) -> torch.Tensor:
        start, self._end = self._end, self._end + num_bytes
        if self._end > self._memory.nbytes:
            raise MegatrainError(
                f"boundary activations take {self._end} bytes of host memory, the plan has {self._memory.nbytes} for "
                "them: micro-batches are larger than planned"
            )
        return self._memory[start : start + num_bytes]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """1-D uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
