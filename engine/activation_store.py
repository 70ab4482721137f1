"""Activations that do not wait on the device: what enters a layer, and what its forward keeps, leave for the host
behind the forward and come back ahead of the backward; or what enters is let go of and computed again
(LayerCall.replay). Compute thread only.

The tensors stay what they are, for the model and for autograd alike; their storage is emptied, once the copy has left
where there is one, and filled again. That is safe where nothing reads them in between: of what enters the trial forward
tells (private_inputs.py), of what is kept the storage itself (owned_storages.py). Whoever did would find no memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatrain_ray.engine.activation_moves import Activations, Stop, away, needed, stops
from megatrain_ray.engine.device import Device, Event
from megatrain_ray.engine.layer_call import bytes_of
from megatrain_ray.engine.layout import ModelLayout
from megatrain_ray.engine.owned_storages import owned_storages
from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.visits import Visit
from megatrain_ray.errors import MegatrainError
from megatrain_ray.trace import Op, Stage


class Entry(NamedTuple):
    """What one micro-batch left of one layer."""

    kind: Activations
    layer: int
    micro_batch: int


@dataclass
class _Away:
    """`places`: where each storage's bytes are on the host. `event`: of the last copy, out or in."""

    storages: list[torch.UntypedStorage]
    places: list[torch.Tensor]
    event: Event
    is_back: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(place.nbytes for place in self.places)


def held_activation_bytes(plan: Plan, layout: ModelLayout) -> int:
    """What they take on the host: as planned, but less where memory is aliased."""
    if layout.aliased_size is None:
        return plan.host_activation_bytes
    largest = max(max(layer.boundary_bytes, layer.kept_bytes) for layer in plan.layers)
    aliased_bytes = layout.aliased_size * plan.precision.working_dtype.itemsize
    return min(plan.host_activation_bytes, max(largest, aliased_bytes))


class ActivationStore:
    """What is away now."""

    def __init__(self, plan: Plan, device: Device, held_bytes: int) -> None:
        """`held_bytes`: of host memory, which is taken in turn where the plan has more."""
        self._plan = plan
        self._device = device
        self._places = _HostPlaces(device, plan.host_activation_bytes, held_bytes)
        self._next: dict[Stop, Stop] = {}
        self._away: dict[Entry, _Away] = {}
        self._leaving: list[_Away] = []

    def begin(self, visits: Sequence[Visit]) -> None:
        """Before a step of these visits."""
        self._next = dict(itertools.pairwise(stops(visits)))
        self._away.clear()
        self._leaving.clear()
        self._places.clear()

    def leave(
        self, layer: int, micro_batch: int, entered: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]
    ) -> None:
        """Behind the forward of a micro-batch through a layer, which `entered` entered and for whose backward `kept`
        was saved (Residents.saving): nobody reads what leaves of them until `bring_back`, or a replay of the layer
        before. What left behind the forward before has left by the time that this one has been computed."""
        plan = self._plan.layers[layer]
        if plan.boundary is None:
            for storage in _storages(entered):
                storage.resize_(0)  # for what is submitted next
        leaving: list[_Away] = []
        for kind in away(plan):
            of_kind = _storages(entered) if kind is Activations.BOUNDARY else owned_storages(kept, plan.kept_bytes)
            if of_kind:
                leaving.append(self._send(Entry(kind, layer, micro_batch), of_kind))
        if leaving:
            self._let_go()
            self._leaving = leaving

    def bring_back(self, stop: Stop) -> None:
        """Ahead of it: what it needs is there again for what is submitted next; what the next one needs is on its
        way."""
        now = self._entries(stop)
        coming = self._entries(self._next[stop]) if stop in self._next else []
        if not now and not coming:
            return
        self._let_go()
        for entry in (*now, *coming):
            self._fetch(entry)
        for entry in now:
            # From here on the memory is freed with the tensors, and the place is somebody else's behind what is
            # submitted next.
            self._device.wait(self._away.pop(entry).event, "h2d")
        if not self._away:  # the next micro-batch, where they come one after the other, has the same places
            self._places.clear()

    def _entries(self, stop: Stop) -> list[Entry]:
        """What is away and comes back for it."""
        entries = (Entry(kind, stop.layer, stop.micro_batch) for kind in needed(self._plan, stop.phase, stop.layer))
        return [entry for entry in entries if entry in self._away]

    def _send(self, entry: Entry, storages: list[torch.UntypedStorage]) -> _Away:
        places = [self._places.take(storage.nbytes()) for storage in storages]
        pairs = [(place, bytes_of(storage)) for storage, place in zip(storages, places, strict=True)]
        sent = _Away(storages, places, self._device.record())
        sent.event = self._device.copy_all(Stage.D2H, pairs, _op(entry, sent), [sent.event])
        self._away[entry] = sent
        return sent

    def _fetch(self, entry: Entry) -> None:
        found = self._away[entry]
        if found.is_back:
            return
        for storage, place in zip(found.storages, found.places, strict=True):
            storage.resize_(place.nbytes)
        after = [self._device.record(), found.event]  # the first: of memory that something submitted before may use
        pairs = [(bytes_of(storage), place) for storage, place in zip(found.storages, found.places, strict=True)]
        found.event, found.is_back = self._device.copy_all(Stage.H2D, pairs, _op(entry, found), after), True

    def _let_go(self) -> None:
        """What left last frees its memory, for what is submitted next."""
        for left in self._leaving:
            self._device.wait(left.event, "d2h")
            for storage in left.storages:
                storage.resize_(0)
        self._leaving = []


class _HostPlaces:
    """Pinned memory, taken from its start on until all of it is free again."""

    def __init__(self, device: Device, planned_bytes: int, held_bytes: int) -> None:
        self._planned_bytes = planned_bytes
        self._memory = torch.empty(held_bytes, dtype=torch.uint8)
        if held_bytes:
            device.pin(self._memory)
        self.clear()

    def clear(self) -> None:
        self._taken_bytes = self._end = 0

    def take(self, num_bytes: int) -> torch.Tensor:
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


def _op(entry: Entry, moved: _Away) -> Op:
    return Op(entry.kind.value, entry.layer, entry.micro_batch, num_bytes=moved.num_bytes)


def _storages(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each once."""
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())
