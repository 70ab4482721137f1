"""Moves working copies from the host into slots before they are used.

The event loop admits transfers: it waits for a slot to be released and for the layer's generation, then submits the
copy. The compute thread waits for arrivals and releases slots. Neither waits for a copy to end: events keep that order
on the device.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from megatrain_ray.engine.device.deadlines import DEADLINE_S, STEP_DEADLINE_S
from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.device.ranks import RankParts, Ranks
from megatrain_ray.engine.host.interfaces import ParamSource
from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.residency import FragmentId, Load, Residency
from megatrain_ray.engine.weights_stream.bound_weights import SlotRing, SlotState
from megatrain_ray.errors import DeadlineError
from megatrain_ray.spans import Row
from megatrain_ray.virtual_clock import Op, Stage


class Arrival(NamedTuple):
    """Describes a submitted load. The bytes of `region` are readable after the event."""

    fragment: FragmentId
    region: torch.Tensor
    event: Event


Gathers = Callable[[int, torch.Tensor, Event], Event]  # (layer, its flat as 1-D uint8, event of the own part)


class AllResidentSource:
    """Is a LayerSource that loads and releases nothing, for plans in which every layer lives on the device."""

    def layer(self, visit: int) -> AbstractContextManager[Mapping[FragmentId, torch.Tensor]]:
        return nullcontext({})

    def sync_collective_order(self, visit: int) -> None:
        pass


class LayerStreamer:
    """Streams one step or evaluation at a time along a residency that is known in advance."""

    def __init__(
        self, device: Device, ring: SlotRing, layout: ModelLayout, source: ParamSource, deadline_s: float = DEADLINE_S,
        gathers: Gathers | None = None,
    ) -> None:  # fmt: skip
        """Create it; `begin` starts to stream.

        deadline_s: limit of the wait for a load to be submitted.
        gathers: given if the source has only this rank's part of a layer, and other devices have the rest.
        """
        self._gathers = gathers
        self._device = device
        self._ring = ring
        self._layout = layout
        self._residency = Residency((), (), ())
        self._source = source
        self._deadline_s = deadline_s
        self._arrivals: list[list[Future[Arrival]]] = []  # by visit: of the fragments that it needs
        self._submissions: list[Future[Arrival]] = []  # one for each load, in the order of loads
        self._behind: list[int] = []  # for each load: latest visit that it or an earlier load waits for; -1: none
        self._released: list[Future[Event]] = []
        self._pump: asyncio.Task[None] | None = None

    def begin(self, residency: Residency, generation: int) -> None:
        """Start to stream weights of this generation along the residency. Event loop only."""
        self._residency = residency
        self._source.expect([load.fragment for load in residency.loads], generation)
        self._released = [Future() for _ in residency.slots]
        self._behind = [*itertools.accumulate((load.after_visit for load in residency.loads), max)]
        self._submissions = [Future() for _ in residency.loads]
        keys = ((load.visit, load.fragment) for load in residency.loads)
        submitted = dict(zip(keys, self._submissions, strict=True))
        latest: dict[FragmentId, Future[Arrival]] = {}  # a fragment that stays in its slot has arrived for later visits
        self._arrivals = []
        for v, held in enumerate(residency.slots):
            latest |= {fragment: submitted[v, fragment] for fragment in held if (v, fragment) in submitted}
            self._arrivals.append([latest[fragment] for fragment in held])
        self._pump = asyncio.create_task(self._stream(generation), name="h2d pump")

    async def finish(self) -> None:
        """Wait until every load is submitted. Raises the error that stopped the pump."""
        if self._pump is not None:
            await self._pump

    async def cancel(self) -> None:
        """Cancel the pump. Waiting threads get CancelledError."""
        if self._pump is None or self._pump.done():
            return
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)

    def wait(self, visit: int) -> Mapping[FragmentId, torch.Tensor]:
        """Return the fragments of the visit on the device. Idempotent.

        Their arrival is ordered before the work that the compute thread submits next. Raises DeadlineError if a load
        was not submitted in time, and the error that stopped the pump.
        """
        arrivals = [self._arrived(future, visit) for future in self._arrivals[visit]]
        for arrival in arrivals:
            self._device.wait(arrival.event, "h2d")
        return {arrival.fragment: arrival.region for arrival in arrivals}

    def sync_collective_order(self, visit: int) -> None:
        """Wait until all loads are submitted that do not depend on this visit or a later one, if loads are gathered.

        So all-gathers of loads have the same place on every device, among the collectives that the compute thread
        submits. Compute thread only, within the visit. Raises as `wait` does.
        """
        if self._gathers is None:
            return
        count = bisect.bisect_left(self._behind, visit)
        if count:
            self._arrived(self._submissions[count - 1], visit)

    @contextmanager
    def layer(self, visit: int) -> Iterator[Mapping[FragmentId, torch.Tensor]]:
        """Yield the visit's fragments, in use until the block ends. Compute thread only."""
        regions, released = self.wait(visit), self._residency.released[visit]
        slots = [(slot, self._name(fragment)) for fragment, slot in self._residency.slots[visit].items()]
        for slot, name in slots:
            self._ring.to(slot, SlotState.IN_USE, name)
        yield regions
        for slot, name in slots:
            self._ring.to(slot, SlotState.FREE if slot in released else SlotState.READY, name)
        self._released[visit].set_result(self._device.record())

    def _arrived(self, future: Future[Arrival], visit: int) -> Arrival:
        if future.done():
            return future.result()
        try:
            with self._device.exposed("optimizer"):  # not submitted yet: it waits for the layer's update
                return future.result(self._deadline_s)
        except TimeoutError:
            raise DeadlineError(f"no load for visit {visit} was submitted within {self._deadline_s:.0f} s") from None

    async def _stream(self, generation: int) -> None:
        try:
            for load, arrival in zip(self._residency.loads, self._submissions, strict=True):
                arrival.set_result(await self._load(load, generation))
        except BaseException as error:
            for arrival in self._submissions:
                if not arrival.done():
                    arrival.set_exception(CancelledError() if isinstance(error, asyncio.CancelledError) else error)
            raise

    async def _load(self, load: Load, generation: int) -> Arrival:
        after = []
        if load.after_visit >= 0:
            released = self._released[load.after_visit]
            if not released.done():
                with self._waiting("slot", load):
                    await asyncio.wrap_future(released)
            after.append(released.result())
        with self._waiting("generation", load):
            weights = await self._source.fetch(load.fragment, generation)
        fragment = self._layout.layers[load.fragment.layer].fragments[load.fragment.index]
        itemsize = weights.parts[0].values.itemsize
        region = self._ring[load.slot].region[: fragment.size * itemsize]
        pairs = [
            (region[(first - fragment.start) * itemsize :][: values.nbytes], values.view(torch.uint8))
            for first, values in weights.parts
        ]
        self._ring.to(load.slot, SlotState.FILLING, self._name(load.fragment))
        num_bytes = sum(source.nbytes for _, source in pairs)
        op = Op("load", load.fragment.layer, fragment=load.fragment.index, num_bytes=num_bytes)
        self._device.timeline.host_waits(weights.ready_at_s)
        event = self._device.copy_all(Stage.H2D, pairs, op, after)
        self._source.release(load.fragment, event)
        if self._gathers is not None:
            event = self._gathers(load.fragment.layer, region, event)
        self._ring.to(load.slot, SlotState.READY, self._name(load.fragment))
        return Arrival(load.fragment, region, event)

    def _waiting(self, what: str, load: Load) -> AbstractContextManager[None]:
        return self._device.spans.span(Row.UPLOADS, f"wait {what}", load.fragment.layer, waits=True)

    def _name(self, fragment: FragmentId) -> str:
        return f"{self._layout.layers[fragment.layer].name}/{fragment.index}"


class SlotGather:
    """Fills slots where each rank uploads only its own part of a layer.

    Runs one all-gather for the trained elements of a layer and one for the frozen ones. Every rank loads the same
    layers in the same order, because all ranks have the same plan.
    """

    def __init__(
        self, layout: ModelLayout, itemsize: int, device: Device, ranks: Ranks, update_deadline_s: float
    ) -> None:
        """Create it for one rank. An element of a working copy has `itemsize` bytes."""
        self._parts = RankParts(layout, ranks.rank, ranks.size)
        self._itemsize = itemsize
        self._device = device
        self._ranks = ranks
        # Meanwhile other ranks may wait for a generation of their own, or for the disk of a save.
        self._timeout_s = STEP_DEADLINE_S + update_deadline_s

    def __call__(self, layer: int, flat: torch.Tensor, loaded: Event) -> Event:
        """Submit the all-gathers of a layer; return the event after which all of `flat` (1-D uint8) is there.

        This rank's part is in it after `loaded`.
        """

        def work() -> None:
            for parts in self._parts.upload_spans_of_all(layer):
                if parts[-1].stop > parts[0].start:
                    edges = [(part.start * self._itemsize, part.stop * self._itemsize) for part in parts]
                    self._ranks.all_gather(flat, [ElementRange(*edge) for edge in edges])

        op = Op("all-gather", layer, num_bytes=flat.nbytes)
        return self._device.all_gather(work, op, loaded, self._timeout_s)
