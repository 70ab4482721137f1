"""Moves gradients between device slots and the host's slab, on the event loop.

A gradient is offloaded when its sum is complete, and then goes to the sink. Where sums do not fit on the device,
partial sums are offloaded after each micro-batch too, and reloaded before the next one adds to them. The slab holds
them in between.
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
    """Requests to copy `flat` to the host once `after` is reached.

    done: gets the event after which `flat` may be written again.
    final: whether the gradient is complete and goes to the sink. Otherwise it stays in its lease until it is fetched,
        or until Muon's directions complete it.
    """

    layer: int
    flat: torch.Tensor
    after: Event
    done: Future[Event]
    final: bool


@dataclass(frozen=True)
class Fetch:
    """Requests to copy a layer's partial sum from the host back into `region`.

    after: gets the event after which `region` is empty; None: it is empty already.
    done: gets the event of the copy.
    """

    layer: int
    region: torch.Tensor
    after: Future[Event] | None
    done: Future[Event]


@dataclass(frozen=True)
class MomentumFetch:
    """Requests to copy a layer's first moments into the region of the request `of`."""

    of: Fetch

    @property
    def done(self) -> Future[Event]:
        return self.of.done


@dataclass(frozen=True)
class Completion:
    """Requests to copy a layer's Muon directions to the host, and to hand its gradient to the sink with them.

    The gradient is on the host already, from a `Departure` that was not final.

    flat: the directions, one element for each element of the gradient.
    after: event after which `flat` may be read.
    done: gets the event after which `flat` may be written again.
    """

    layer: int
    flat: torch.Tensor
    after: Event
    done: Future[Event]


Transfer = Departure | Fetch | MomentumFetch | Completion


class _InFlight(NamedTuple):
    lease: Lease
    done: Event
    directions: Lease | None = None
    flat: torch.Tensor | None = None  # source of the copy: keeps its memory allocated until the copy has ended


class GradientOffloader:
    """Runs transfer requests in the order of submission.

    A fetch never blocks the queue, because the offload it depends on was submitted first.
    """

    def __init__(self, device: Device, host: Host) -> None:
        self._device = device
        self._host = host
        # No maxsize: a region is reused only after its last contents have left. So at most one transfer out and one in
        # for each region (those of momenta and directions too) are queued. If the queue were full, submit_nowait could
        # not wait.
        self._transfers: asyncio.Queue[Transfer | None] = asyncio.Queue()
        self._in_flight: asyncio.Queue[_InFlight | None] = asyncio.Queue(maxsize=64)
        self._unfinished: dict[int, _InFlight] = {}
        self._error: BaseException | None = None

    async def run(self, update: int) -> None:
        """Serve one step. Return when every gradient has landed, after `submit_nowait(None)`.

        update: number of the update that consumes the gradients.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(update), name="gradient pump")
                group.create_task(self._land(update), name="gradient landing")
        except BaseException as error:
            self._fail(error)
            raise

    def submit_nowait(self, transfer: Transfer | None) -> None:
        """Queue a transfer; None says that the step has no more. Event loop only."""
        self._transfers.put_nowait(transfer)
        if self._error is not None:
            self._fail(self._error)

    def _fail(self, error: BaseException) -> None:
        """Fail all queued transfers, so that nobody waits for a pump that has ended."""
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
            del transfer  # drops the last reference to the memory of an offloaded gradient
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
        # Copies of a stage run in order, and after one fails so do all later ones. So the gradient is there first.
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
