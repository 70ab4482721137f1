"""Activations that do not wait on the device: what enters a layer, and what its forward keeps, leave for the host, or
for the disk, behind the forward and come back ahead of the backward; or what enters is let go of and computed again
(LayerCall.replay). Compute thread only.

The tensors stay what they are, for the model and for autograd alike; their storage is emptied, once the copy has left
where there is one, and filled again. That is safe where nothing reads them in between: of what enters the trial forward
tells (discovery/private_inputs.py), of what is kept the storage itself (owned_storages.py). Whoever did would find no
memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatrain_ray.engine.activations.disk_activations import ActivationFile, OnDisk
from megatrain_ray.engine.activations.host_activations import HostPlaces, OnHost
from megatrain_ray.engine.activations.owned_storages import owned_storages
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.activation_moves import Activations, Stop, away, is_on_disk, needed, stops
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.schedule import Visit
from megatrain_ray.virtual_clock import Op


class Entry(NamedTuple):
    """What one micro-batch left of one layer."""

    kind: Activations
    layer: int
    micro_batch: int


def held_activation_bytes(plan: Plan, layout: ModelLayout) -> int:
    """What they take on the host: as planned, but less where memory is aliased."""
    if layout.aliased_size is None:
        return plan.host_activation_bytes
    largest = max(max(layer.boundary_bytes, layer.kept_bytes) for layer in plan.layers)
    aliased_bytes = layout.aliased_size * plan.precision.working_dtype.itemsize
    return min(plan.host_activation_bytes, max(largest, aliased_bytes))


class ActivationStore:
    """What is away now."""

    def __init__(self, plan: Plan, device: Device, held_bytes: int, file: ActivationFile | None = None) -> None:
        """`held_bytes`: of host memory, which is taken in turn where the plan has more. `file`: where some are on
        disk."""
        self._plan = plan
        self._device = device
        self._places = HostPlaces(device, plan.host_activation_bytes, held_bytes)
        self._file = file
        self._next: dict[Stop, Stop] = {}
        self._away: dict[Entry, OnHost | OnDisk] = {}
        self._leaving: list[OnHost | OnDisk] = []
        self._unread: list[Entry] = []  # of those on disk, what has left since something came back
        self._numbers: dict[Stop, int] = {}
        self._absent: dict[Entry, set[int]] = {}  # storages, by identity
        self._wanted: dict[Entry, int] = {}  # of those on disk, the number of the stop that they come back for

    def begin(self, visits: Sequence[Visit]) -> None:
        """Before a step of these visits."""
        order = stops(visits)
        self._next = dict(itertools.pairwise(order))
        self._numbers = {stop: i for i, stop in enumerate(order)}
        self._away.clear()
        self._leaving.clear()
        self._absent.clear()
        self._unread.clear()
        self._places.clear()
        if self._file:
            self._file.begin()
            numbers = self._numbers.items()
            self._wanted = {e: i for stop, i in numbers for e in self._needed(stop) if self._is_on_disk(e)}

    def leave(
        self,
        layer: int,
        micro_batch: int,
        entered: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        between: Sequence[torch.UntypedStorage] = (),
    ) -> None:
        """Behind the forward of a micro-batch through a layer, which `entered` entered and for whose backward `kept`
        was saved (Residents.saving), and `between` by the forward of the block that it is a part of: nobody reads what
        leaves of them until `bring_back`, or a replay of the layer before. What left behind the forward before has left
        by the time that this one has been computed."""
        plan = self._plan.layers[layer]
        if plan.boundary is None:
            for storage in _storages(entered):
                storage.resize_(0)  # for what is submitted next
        leaving: list[OnHost | OnDisk] = []
        for kind in away(plan):
            of_kind = _storages(entered)
            if kind is Activations.KEPT:
                room = plan.kept_bytes - sum(storage.nbytes() for storage in between)
                of_kind = [*between, *owned_storages(kept, room)]
            if of_kind:
                leaving.append(self._send(Entry(kind, layer, micro_batch), of_kind))
        if leaving:
            self._let_go()
            self._leaving = leaving

    def bring_back(self, stop: Stop) -> None:
        """Ahead of it: what it needs is there again for what is submitted next; what the next one needs is on its
        way."""
        if self._unread and stop in self._numbers:  # the head has none
            self._read_ahead()
        now = self._entries(stop)
        coming = self._entries(self._next[stop]) if stop in self._next else []
        if not now and not coming:
            return
        self._let_go()
        for entry in (*now, *coming):
            self._away[entry].fetch()
        for entry in now:
            # From here on the memory is freed with the tensors, and the place is somebody else's behind what is
            # submitted next.
            self._device.wait(self._away.pop(entry).back(), "h2d")
            del self._absent[entry]
        if not self._away:  # the next micro-batch, where they come one after the other, has the same places
            self._places.clear()
            if self._file:
                self._file.clear()

    def check_there(self, tensor: torch.Tensor) -> None:
        """Raises RuntimeError for one that is away: what is about to read it would read anything."""
        if any(tensor.untyped_storage()._cdata in storages for storages in self._absent.values()):
            raise RuntimeError("a backward reads what has not come back: this is a defect of the plan")

    def close(self) -> None:
        """Idempotent."""
        if self._file:
            self._file.close()

    def _entries(self, stop: Stop) -> list[Entry]:
        """What is away and comes back for it."""
        return [entry for entry in self._needed(stop) if entry in self._away]

    def _needed(self, stop: Stop) -> list[Entry]:
        of_stop = needed(self._plan, stop.phase, stop.layer)
        return [Entry(kind, layer, stop.micro_batch) for kind, layer in of_stop]

    def _is_on_disk(self, entry: Entry) -> bool:
        return is_on_disk(self._plan.layers[entry.layer], entry.kind)

    def _send(self, entry: Entry, storages: list[torch.UntypedStorage]) -> OnHost | OnDisk:
        num_bytes = sum(storage.nbytes() for storage in storages)
        self._absent[entry] = {storage._cdata for storage in storages}
        op = Op(entry.kind.value, entry.layer, entry.micro_batch, num_bytes=num_bytes)
        if self._file and self._is_on_disk(entry):
            self._unread.append(entry)
            self._away[entry] = sent = self._file.send(op, storages)
            return sent
        self._away[entry] = kept = self._places.send(op, storages)
        return kept

    def _read_ahead(self) -> None:
        """All that this sweep leaves on disk has left: from here on it is read in the order in which it is wanted."""
        self._let_go()
        assert self._file is not None
        coming = (self._away[entry] for entry in sorted(self._unread, key=lambda entry: self._wanted[entry]))
        self._file.expect([each for each in coming if isinstance(each, OnDisk)])
        self._unread.clear()

    def _let_go(self) -> None:
        """What left last frees its memory, for what is submitted next."""
        for left in self._leaving:
            self._device.wait(left.gone(), "d2h")
            for storage in left.storages:
                storage.resize_(0)
        self._leaving = []


def _storages(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each once."""
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())
