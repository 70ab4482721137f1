"""GradientOffloader: the event loop's side of gradients. It moves them between device slots and the host's slab.

A gradient departs when its sum is complete and lands at the sink. Where sums do not fit the device they also depart
after each micro-batch and come back before the next one adds to them: then the slab holds them in between.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.host.interfaces import Host, Lease
from megatrain_ray.errors import MegatrainError
from megatrain_ray.spans import Row
from megatrain_ray.virtual_clock import Op, Stage


@dataclass(frozen=True)
class Departure:
    """Copy `flat` to the host once `after` is reached; `done` gets the event after which `flat` may be written again.

    `final`: the gradient is complete and goes to the sink; else it stays in its lease until it is fetched, or until
    Muon's directions complete it.
    """

    layer: int
    flat: torch.Tensor
    after: Event
    done: Future[Event]
    final: bool


@dataclass(frozen=True)
class Fetch:
    """Copy a layer's unfinished sum back into `region`, which is empty after `after` (None: already)."""

    layer: int
    region: torch.Tensor
    after: Future[Event] | None
    done: Future[Event]


@dataclass(frozen=True)
class MomentumFetch:
    """Copy a layer's first moments into the region that `of` names."""

    of: Fetch

    @property
    def done(self) -> Future[Event]:
        return self.of.done


@dataclass(frozen=True)
class Completion:
    """Copy a layer's directions (`flat`, as large as its gradient) to the host as a Departure, and let its gradient,
    which is there, go to the sink with them."""

    layer: int
    flat: torch.Tensor
    after: Event
    done: Future[Event]


Transfer = Departure | Fetch | MomentumFetch | Completion


class _InFlight(NamedTuple):
    lease: Lease
    done: Event
    directions: Lease | None = None
    flat: torch.Tensor | None = None  # what is copied: its memory must not be given to anything else before


class GradientOffloader:
    """Transfers in the order of submission: what a fetch needs was submitted before it, so it never waits here."""

    def __init__(self, device: Device, host: Host) -> None:
        self._device = device
        self._host = host
        # No maxsize: a region is used again only after what left it has left, so one transfer out and one in for each
        # region, those of momenta and directions too, are the most that wait here. A full queue would have nobody to
        # tell.
        self._transfers: asyncio.Queue[Transfer | None] = asyncio.Queue()
        self._in_flight: asyncio.Queue[_InFlight | None] = asyncio.Queue(maxsize=64)
        self._unfinished: dict[int, _InFlight] = {}
        self._error: BaseException | None = None

    async def run(self, update: int) -> None:
        """Serves one step: returns when every gradient has landed, after `submit_nowait(None)`."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(update), name="gradient pump")
                group.create_task(self._land(update), name="gradient landing")
        except BaseException as error:
            self._fail(error)
            raise

    def submit_nowait(self, transfer: Transfer | None) -> None:
        """Event loop only; None says that the step has no more."""
        self._transfers.put_nowait(transfer)
        if self._error is not None:
            self._fail(self._error)

    def _fail(self, error: BaseException) -> None:
        """Whoever waits for a transfer must not wait for a pump that is gone."""
        self._error = error
        while not self._transfers.empty():
            transfer = self._transfers.get_nowait()
            if transfer is not None:
                transfer.done.set_exception(MegatrainError(f"gradients no longer move: {error!r}"))

    async def _pump(self, update: int) -> None:
        while (transfer := await self._transfers.get()) is not None:
            try:
                await self._move(transfer, update)
            except BaseException as error:
                if not transfer.done.done():
                    transfer.done.set_exception(MegatrainError(f"a gradient could not move: {error!r}"))
                raise
            del transfer  # and with it the memory of a gradient that has left
        await self._in_flight.put(None)

    async def _move(self, transfer: Transfer, update: int) -> None:
        match transfer:
            case Departure():
                await self._depart(transfer, update)
            case Fetch():
                self._fetch(transfer)
            case MomentumFetch(of=fetch):
                await self._fetch_momentum(fetch, update - 1)
            case Completion():
                await self._complete(transfer, update)

    async def _depart(self, departure: Departure, update: int) -> None:
        unfinished = self._unfinished.pop(departure.layer, None)
        if unfinished:
            lease = unfinished.lease
        else:
            with self._waiting("room", departure.layer):
                lease = await self._host.lease(departure.layer, update)
            self._device.timeline.stage_waits(Stage.D2H, lease.free_at_s)
        op = Op("offload", departure.layer, num_bytes=departure.flat.nbytes)
        source = departure.flat.view(torch.uint8)
        done = self._device.copy(Stage.D2H, lease.region[: source.nbytes], source, op, [departure.after])
        departure.done.set_result(done)
        if departure.final:
            await self._in_flight.put(_InFlight(lease, done, flat=departure.flat))
        else:
            self._unfinished[departure.layer] = _InFlight(lease, done)

    async def _complete(self, completion: Completion, update: int) -> None:
        gradient = self._unfinished.pop(completion.layer)
        with self._waiting("room", completion.layer):
            lease = await self._host.lease_direction(completion.layer, update)
        op = Op("complete", completion.layer, num_bytes=completion.flat.nbytes)
        source = completion.flat.view(torch.uint8)
        # A stage keeps the order of its copies, and fails with the first: the gradient is there before.
        done = self._device.copy(Stage.D2H, lease.region, source, op, [gradient.done, completion.after])
        completion.done.set_result(done)
        await self._in_flight.put(_InFlight(gradient.lease, done, lease))

    async def _fetch_momentum(self, fetch: Fetch, generation: int) -> None:
        after = [] if fetch.after is None else [fetch.after.result()]
        with self._waiting("generation", fetch.layer):
            momentum = await self._host.momentum(fetch.layer, generation)
        for start, values in momentum:
            op = Op("momentum", fetch.layer, num_bytes=values.nbytes)
            region = fetch.region[values.itemsize * start :][: values.nbytes]
            after = [self._device.copy(Stage.H2D, region, values.view(torch.uint8), op, after)]
        fetch.done.set_result(after[0])

    def _fetch(self, fetch: Fetch) -> None:
        gradient = self._unfinished[fetch.layer]
        lease, stored = gradient.lease, gradient.done
        after = [stored] if fetch.after is None else [stored, fetch.after.result()]
        op = Op("fetch", fetch.layer, num_bytes=fetch.region.nbytes)
        source = lease.region[: fetch.region.nbytes]
        fetch.done.set_result(self._device.copy(Stage.H2D, fetch.region, source, op, after))

    def _waiting(self, what: str, layer: int) -> AbstractContextManager[None]:
        return self._device.spans.span(Row.GRADIENTS, f"wait {what}", layer, waits=True)

    async def _land(self, update: int) -> None:
        loop = asyncio.get_running_loop()
        while (flight := await self._in_flight.get()) is not None:
            await loop.run_in_executor(None, flight.done.synchronize)
            with self._device.spans.span(Row.LANDINGS, "land", flight.lease.layer):
                await self._host.land(flight.lease, update, flight.done.at_s, flight.directions)
            del flight
