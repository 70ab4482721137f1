"""LayerStreamer: moves working copies from the host into slots ahead of their use.

The event loop admits transfers: it waits for a slot to be let go of and for the layer's generation, then submits the
copy. The compute thread waits for arrivals and lets go of slots. Neither waits for a copy to end: that order is kept
on the device, by events.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.host.interfaces import HostWeights, ParamSource
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.residency import FragmentId, Load, Residency
from megatrain_ray.engine.weights_stream.slot_ring import SlotRing, SlotState
from megatrain_ray.errors import DeadlineError
from megatrain_ray.spans import Row
from megatrain_ray.virtual_clock import Op, Stage


class Arrival(NamedTuple):
    """A submitted load: the slot's bytes are readable after the event."""

    fragment: FragmentId
    region: torch.Tensor
    event: Event


Gathers = Callable[[int, torch.Tensor, Event], Event]  # of a layer's flat (1-D uint8), after the own part is there


class NoStreamer:
    """A LayerSource where every layer lives on the device: nothing arrives, and nothing is let go of."""

    def layer(self, visit: int) -> AbstractContextManager[Mapping[FragmentId, torch.Tensor]]:
        return nullcontext({})


class LayerStreamer:
    """Streams one step or evaluation at a time along a residency that is known in advance."""

    def __init__(
        self,
        device: Device,
        ring: SlotRing,
        layout: ModelLayout,
        source: ParamSource,
        deadline_s: float = DEADLINE_S,
        gathers: Gathers | None = None,
    ) -> None:
        """`gathers`: where the source has a part of what is loaded, and other devices the rest."""
        self._gathers = gathers
        self._device = device
        self._ring = ring
        self._layout = layout
        self._residency = Residency((), (), ())
        self._source = source
        self._deadline_s = deadline_s
        self._arrivals: dict[tuple[int, FragmentId], Future[Arrival]] = {}
        self._submissions: list[Future[Arrival]] = []  # of each load, in their order
        self._behind: list[int] = []  # of each load the visit that it, or one before it, waits for; -1: none
        self._released: list[Future[Event]] = []
        self._pump: asyncio.Task[None] | None = None

    def begin(self, residency: Residency, generation: int) -> None:
        """Starts to stream weights of this generation along the residency. Event loop only."""
        self._residency = residency
        self._source.expect([load.fragment for load in residency.loads], generation)
        self._released = [Future() for _ in self._residency.slots]
        loads: dict[FragmentId, Future[Arrival]] = {}
        by_visit: dict[int, list[Load]] = {}
        for load in self._residency.loads:
            by_visit.setdefault(load.visit, []).append(load)
        self._arrivals, self._submissions = {}, []
        self._behind = [*itertools.accumulate((load.after_visit for load in self._residency.loads), max)]
        for v, held in enumerate(self._residency.slots):
            for load in by_visit.get(v, ()):
                loads[load.fragment] = Future()
                self._submissions.append(loads[load.fragment])
            self._arrivals.update({(v, fragment): loads[fragment] for fragment in held})
        self._pump = asyncio.create_task(self._stream(generation), name="h2d pump")

    async def finish(self) -> None:
        """Waits until every load was submitted; raises what went wrong in the pump."""
        if self._pump is not None:
            await self._pump

    async def cancel(self) -> None:
        """Gives the step up: waiting threads get CancelledError."""
        if self._pump is None or self._pump.done():
            return
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)

    def prefetch(self, visit: int) -> Sequence[Future[Arrival]]:
        """The arrivals of a visit, submitted or still to be. Any number of times."""
        return [self._arrivals[visit, fragment] for fragment in self._residency.slots[visit]]

    def wait(self, visit: int) -> Mapping[FragmentId, torch.Tensor]:
        """Fragments of the visit, on the device, ordered before what the compute thread submits next. Idempotent.

        Raises DeadlineError when a load was not submitted in time, and what the pump raised.
        """
        arrivals = [self._arrived(future, visit) for future in self.prefetch(visit)]
        for arrival in arrivals:
            self._device.wait(arrival.event, "h2d")
        return {arrival.fragment: arrival.region for arrival in arrivals}

    def await_submitted(self, visit: int) -> None:
        """Until all loads are submitted that wait for no visit from this one on. So what devices send each other for
        loads comes at the same place on each of them, among what the compute thread has them send. Compute thread only,
        within the visit.

        Raises as `wait`.
        """
        count = bisect.bisect_left(self._behind, visit)
        if count:
            self._arrived(self._submissions[count - 1], visit)

    @contextmanager
    def layer(self, visit: int) -> Iterator[Mapping[FragmentId, torch.Tensor]]:
        """The visit's fragments, in use until the block ends. Compute thread only."""
        regions = self.wait(visit)
        self._move(visit, SlotState.IN_USE)
        yield regions
        self._release(visit)

    def _arrived(self, future: Future[Arrival], visit: int) -> Arrival:
        if future.done():
            return future.result()
        try:
            with self._device.exposed("optimizer"):  # not submitted yet: the generation it waits for is not there
                return future.result(self._deadline_s)
        except FutureTimeout:
            raise DeadlineError(f"no load for visit {visit} was submitted within {self._deadline_s:.0f} s") from None

    def _move(self, visit: int, state: SlotState) -> None:
        for fragment, slot in self._residency.slots[visit].items():
            self._ring.to(slot, state, self._name(fragment))

    def _release(self, visit: int) -> None:
        frees = self._residency.frees[visit]
        for fragment, slot in self._residency.slots[visit].items():
            self._ring.to(slot, SlotState.FREE if slot in frees else SlotState.READY, self._name(fragment))
        self._released[visit].set_result(self._device.record())

    async def _stream(self, generation: int) -> None:
        try:
            for load in self._residency.loads:
                await self._load(load, generation)
        except BaseException as error:
            self._fail(error)
            raise

    async def _load(self, load: Load, generation: int) -> None:
        after = []
        if load.after_visit >= 0:
            released = self._released[load.after_visit]
            if not released.done():
                with self._waiting("slot", load):
                    await asyncio.wrap_future(released)
            after.append(released.result())
        with self._waiting("generation", load):
            weights = await self._source.fetch(load.fragment, generation)
        start = self._layout.layers[load.fragment.layer].fragments[load.fragment.index].start
        region = self._ring[load.slot].region[: self._num_bytes(load.fragment, weights)]
        pairs = [
            (region[(first - start) * values.itemsize :][: values.nbytes], values.view(torch.uint8))
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
        self._arrivals[load.visit, load.fragment].set_result(Arrival(load.fragment, region, event))

    def _num_bytes(self, fragment: FragmentId, weights: HostWeights) -> int:
        """Of all of it."""
        itemsize = weights.parts[0].values.itemsize
        return self._layout.layers[fragment.layer].fragments[fragment.index].size * itemsize

    def _waiting(self, what: str, load: Load) -> AbstractContextManager[None]:
        return self._device.spans.span(Row.UPLOADS, f"wait {what}", load.fragment.layer, waits=True)

    def _fail(self, error: BaseException) -> None:
        for future in self._arrivals.values():
            if not future.done():
                cancelled = isinstance(error, asyncio.CancelledError)
                future.set_exception(CancelledError() if cancelled else error)

    def _name(self, fragment: FragmentId) -> str:
        return f"{self._layout.layers[fragment.layer].name}/{fragment.index}"
