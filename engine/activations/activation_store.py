"""Offloads activations after a layer's forward and reloads them before its backward. Compute thread only.

Activations are what enters a layer (its boundary) and what its forward keeps for the backward. They are offloaded to
host memory or disk. Instead, a layer's boundary may be dropped and computed again (LayerCall.replay).

The tensor objects stay the same for the model and for autograd. Only their storage is emptied, after the copy has left
if there is one, and filled again later. That is safe if nothing reads them in between. For boundaries the trial forward
finds that out (discovery/measure_activations.py). For what is kept, the storage's own reference count tells
(`owned_storages`). A reader in between would find no memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatrain_ray.engine.activations.disk_activations import DiskActivations, OffloadedToDisk
from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.layer_calls.layer_call import bytes_of
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.activation_moves import Activations, Stop, away, is_on_disk, needed, stops
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.schedule import Visit
from megatrain_ray.errors import MegatrainError
from megatrain_ray.virtual_clock import Op, Stage


@dataclass
class OnHost:
    """Tracks what one layer left of one micro-batch in host memory."""

    device: Device
    op: Op
    storages: list[torch.UntypedStorage]
    places: Sequence[torch.Tensor]  # host memory of each storage's bytes
    event: Event  # the last copy, out of the device or back
    is_reloaded: bool = False  # whether the copy back is submitted

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
        pairs = list(zip(map(bytes_of, self.storages), self.places, strict=True))
        self.event, self.is_reloaded = self.device.copy_all(Stage.H2D, pairs, self.op, after), True

    def reloaded(self) -> Event:
        """Return the event after which its storages have their contents again."""
        return self.event


class HostBuffer:
    """Allocates pinned host memory from its start on, until `clear` frees all of it at once."""

    def __init__(self, device: Device, planned_bytes: int, held_bytes: int) -> None:
        """Allocate and pin `held_bytes`. If the plan has more, allocations start again at the beginning of these."""
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
        sizes = [storage.nbytes() for storage in storages]
        places = torch.split(self._allocate(sum(sizes)), sizes)
        pairs = list(zip(places, map(bytes_of, storages), strict=True))
        event = self._device.copy_all(Stage.D2H, pairs, op, [self._device.record()])
        return OnHost(self._device, op, storages, places, event)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate 1-D uint8 memory, in one piece. Raises MegatrainError if it exceeds the planned bytes."""
        self._taken_bytes += num_bytes
        if self._taken_bytes > self._planned_bytes:
            raise MegatrainError(
                f"activations take {self._taken_bytes} bytes of host memory, the plan has {self._planned_bytes} for "
                "them: micro-batches are larger than planned"
            )
        start = self._end if self._end + num_bytes <= self._memory.nbytes else 0
        self._end = start + num_bytes
        return self._memory[start : self._end]


# Smaller storages stay on the device: all of a model's together are a few megabytes, and each would cost a copy.
SMALL_BYTES = 4096


class Entry(NamedTuple):
    """Identifies what one layer left of one micro-batch: its input, or what it kept."""

    kind: Activations
    layer: int
    micro_batch: int


def held_activation_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Return the host memory to allocate: as planned, or less if the layout aliases host memory.

    Then it is what the working copies and the state of layers take together, or what one layer leaves if that is more.
    What little there is stays whole: what experts keep holds indices, and those of other layers may be out of bounds.
    """
    if layout.aliased_size is None:
        return plan.host_activation_bytes
    largest = max(max(layer.boundary_bytes, layer.kept_bytes) for layer in plan.layers)
    return min(plan.host_activation_bytes, max(largest, layout.aliased_size * plan.precision.element_bytes))


class ActivationStore:
    """Tracks activations offloaded to host memory or disk, by layer and micro-batch, and reloads them."""

    def __init__(self, plan: Plan, device: Device, held_bytes: int, file: DiskActivations | None = None) -> None:
        """Allocate host memory for offloaded activations (HostBuffer); those on disk are in `file`."""
        self._plan = plan
        self._device = device
        self._buffer = HostBuffer(device, plan.host_activation_bytes, held_bytes)
        self._file = file
        self._next: dict[Stop, Stop] = {}
        self._offloaded: dict[Entry, OnHost | OffloadedToDisk] = {}
        self._in_transit: list[OnHost | OffloadedToDisk] = []
        self._unread: list[Entry] = []  # entries on disk, offloaded since the last reload
        self._numbers: dict[Stop, int] = {}
        self._storage_ids: dict[Entry, set[int]] = {}  # of the storages that are offloaded now
        self._wanted: dict[Entry, int] = {}  # entries on disk: number of the stop that reloads them

    def begin(self, visits: Sequence[Visit]) -> None:
        """Prepare for a step with these visits. Forgets everything about the step before."""
        order = stops(visits)
        self._next = dict(itertools.pairwise(order))
        self._numbers = {stop: i for i, stop in enumerate(order)}
        self._offloaded.clear()
        self._in_transit.clear()
        self._storage_ids.clear()
        self._unread.clear()
        self._buffer.clear()
        if self._file:
            self._file.begin()
            numbers = self._numbers.items()
            self._wanted = {e: i for stop, i in numbers for e in self._needed(stop) if self._is_on_disk(e)}

    def offload(
        self, layer: int, micro_batch: int, entered: Sequence[torch.Tensor], kept: Sequence[torch.Tensor],
        between: Sequence[torch.UntypedStorage] = (),
    ) -> None:  # fmt: skip
        """Offload the activations of one micro-batch, after its forward through `layer`.

        Nobody reads what is offloaded until `reload`, or until a replay of the layer if that is earlier. This call
        also releases the device memory of what the previous call offloaded: the compute stream waits for those copies,
        which run under this layer's forward.

        entered: tensors that entered the layer.
        kept: tensors that were saved for the layer's backward (WeightBindings.saving).
        between: storages saved by the forward of the block that the layer is a part of.
        """
        plan = self._plan.layers[layer]
        if plan.boundary is None:
            for storage in _storages(entered):
                storage.resize_(0)  # work that is submitted next may use the memory
        sent: list[OnHost | OffloadedToDisk] = []
        for kind in away(plan):
            storages = _storages(entered)
            if kind is Activations.KEPT:
                room = plan.kept_bytes - sum(storage.nbytes() for storage in between)
                storages = [*between, *owned_storages(kept, room)]
            if storages:
                sent.append(self._send(Entry(kind, layer, micro_batch), storages))
        if sent:
            self._release_in_transit()
            self._in_transit = sent

    def reload(self, stop: Stop) -> None:
        """Make activations needed by `stop` resident for work submitted next, and start transfers for the next stop."""
        if self._unread and stop in self._numbers:  # the head needs nothing back
            self._read_ahead()
        now = self._offloaded_for(stop)
        coming = self._offloaded_for(self._next[stop]) if stop in self._next else []
        if not now and not coming:
            return
        self._release_in_transit()
        for entry in (*now, *coming):
            settles = self._plan.settles and entry.kind is Activations.BOUNDARY
            with self._device.settling() if settles else nullcontext():
                self._offloaded[entry].reload()
        for entry in now:
            # From here on the device memory is freed with the tensors. The host memory may be reused by copies that are
            # ordered after the work submitted next.
            self._device.wait(self._offloaded.pop(entry).reloaded(), "h2d")
            del self._storage_ids[entry]
        if not self._offloaded:  # so that the next micro-batch reuses the same memory, if they run one after the other
            self._buffer.clear()
            if self._file:
                self._file.clear()

    def check_resident(self, tensor: torch.Tensor) -> None:
        """Raise RuntimeError if `tensor` is offloaded, because a reader would get arbitrary values."""
        if any(tensor.untyped_storage()._cdata in storages for storages in self._storage_ids.values()):
            raise RuntimeError("a backward reads what has not come back: this is a defect of the plan")

    def close(self) -> None:
        """Stop the transfers to and from disk. Idempotent."""
        if self._file:
            self._file.close()

    def _offloaded_for(self, stop: Stop) -> list[Entry]:
        return [entry for entry in self._needed(stop) if entry in self._offloaded]

    def _needed(self, stop: Stop) -> list[Entry]:
        pairs = needed(self._plan, stop.phase, stop.layer)
        return [Entry(kind, layer, stop.micro_batch) for kind, layer in pairs]

    def _is_on_disk(self, entry: Entry) -> bool:
        return is_on_disk(self._plan.layers[entry.layer], entry.kind)

    def _send(self, entry: Entry, storages: list[torch.UntypedStorage]) -> OnHost | OffloadedToDisk:
        num_bytes = sum(storage.nbytes() for storage in storages)
        self._storage_ids[entry] = {storage._cdata for storage in storages}
        op = Op(entry.kind.value, entry.layer, entry.micro_batch, num_bytes=num_bytes)
        if self._file and self._is_on_disk(entry):
            self._unread.append(entry)
            self._offloaded[entry] = self._file.send(op, storages)
        else:
            self._offloaded[entry] = self._buffer.send(op, storages)
        return self._offloaded[entry]

    def _read_ahead(self) -> None:
        """Start to read activations from disk, in the order of the stops that need them.

        Called when the forwards have offloaded all that goes to disk before the next reload.
        """
        self._release_in_transit()
        assert self._file is not None
        coming = (self._offloaded[entry] for entry in sorted(self._unread, key=lambda entry: self._wanted[entry]))
        self._file.expect([each for each in coming if isinstance(each, OffloadedToDisk)])
        self._unread.clear()

    def _release_in_transit(self) -> None:
        """Release the device memory of what was offloaded last, for work that is submitted next."""
        for entry in self._in_transit:
            self._device.wait(entry.offloaded(), "d2h")
            for storage in entry.storages:
                storage.resize_(0)
        self._in_transit = []


def _storages(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors, each once."""
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def owned_storages(saved: Sequence[torch.Tensor], most_bytes: int) -> list[torch.UntypedStorage]:
    """Return the storages that only the tensors in `saved` reference, largest first, as many as fit.

    This leaves out what entered the layer, what it returned, weights, buffers, and what a module put aside. It compares
    the storage's own reference count, so any view of it is noticed, wherever it is held.

    saved: tensors that nobody but the graph holds (WeightBindings.saving).
    most_bytes: limit for the sum of the returned storages.
    """
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in saved}
    num_saved = Counter(tensor.untyped_storage()._cdata for tensor in saved)
    owned = []
    for key, storage in sorted(storages.items(), key=lambda item: -item[1].nbytes()):
        # The extra reference is `storage` itself.
        is_owned = torch._C._storage_Use_Count(key) == num_saved[key] + 1
        if is_owned and SMALL_BYTES <= storage.nbytes() <= most_bytes:
            owned.append(storage)
            most_bytes -= storage.nbytes()
    return owned
