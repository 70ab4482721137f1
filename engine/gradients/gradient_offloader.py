"""Moves gradients between device slots and the host's slab, on the event loop.

A gradient is offloaded when its sum is complete, and then goes to the sink. Where sums do not fit on the device,
partial sums are offloaded after each micro-batch too, and loaded before the next one adds to them. The slab holds them
in between. Gradients that waited on the device for the scale of a clipped update are offloaded after the step,
concurrently with the next forward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.host.interfaces import Host, Lease
from megatrain_ray.errors import MegatrainError, first_failure
from megatrain_ray.spans import Row
from megatrain_ray.virtual_clock import Op, Stage


@dataclass(frozen=True)
class _Offload:
    """Requests to copy `flat` to the host once `after` is reached."""

    layer: int
    flat: torch.Tensor
    after: Event
    done: Future[Event]  # gets the event after which `flat` may be written again


@dataclass(frozen=True)
class OffloadGradient(_Offload):
    """Requests to offload a layer's gradient."""

    # Whether the gradient is complete and goes to the sink. Otherwise it stays in its lease until it is loaded, or
    # until Muon's directions complete it.
    final: bool


@dataclass(frozen=True)
class OffloadDirections(_Offload):
    """Requests to offload a layer's Muon directions, and to hand its gradient to the sink with them.

    The gradient is on the host already, from a request that was not final. There is one direction for each element of
    the gradient.
    """


@dataclass(frozen=True)
class _Load:
    """Requests a copy from the host into `region`."""

    layer: int
    region: torch.Tensor
    after: Future[Event] | None  # gets the event after which `region` is empty; None: it is empty already
    done: Future[Event]  # gets the event of the copy


class LoadGradient(_Load):
    """Requests what the host has of a layer's gradient: a partial sum, or this rank's part of a complete one."""


class LoadMomentum(_Load):
    """Requests a layer's first moments."""


TransferRequest = OffloadGradient | OffloadDirections | LoadGradient | LoadMomentum


class _InFlight(NamedTuple):
    lease: Lease
    done: Event
    directions: Lease | None = None
    flat: torch.Tensor | None = None  # source of the copy: keeps its memory allocated until the copy has ended


class GradientOffloader:
    """Runs the transfer requests of one step after the other, in the order of submission.

    `run` serves a step, concurrently with its compute, until `end_step`. Then comes `offload_deferred`. A load never
    blocks the queue, because the offload it depends on was submitted first. Event loop only, except `submit` and
    `defer`.
    """

    def __init__(self, device: Device, host: Host) -> None:
        self._device = device
        self._host = host
        self._loop = asyncio.get_running_loop()
        # No maxsize: a region is reused only after its last contents have left. So at most one transfer out and one in
        # for each region (those of momenta and directions too) are queued. If the queue were full, `submit` could not
        # wait.
        self._requests: asyncio.Queue[TransferRequest | None] = asyncio.Queue()
        self._in_flight: asyncio.Queue[_InFlight | None] = asyncio.Queue(maxsize=64)
        self._incomplete: dict[int, _InFlight] = {}  # on the host: partial sums, and gradients without directions
        self._deferred: list[OffloadGradient] = []  # for `offload_deferred`
        self._offloading_deferred: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    def submit(self, request: TransferRequest) -> None:
        """Queue a request. Call from the compute thread."""
        self._loop.call_soon_threadsafe(self._enqueue, request)

    def defer(self, requests: Iterable[OffloadGradient]) -> None:
        self._deferred = list(requests)

    async def run(self, update: int) -> None:
        """Serve a step until all gradients of its update have landed, after the deferred ones of the step before."""
        await self.join_deferred()
        await self._serve(update)

    def end_step(self) -> None:
        """Say that the step submits no more requests."""
        self._enqueue(None)

    def offload_deferred(self, update: int) -> None:
        """Start to offload the gradients that waited on the device. Call after `run` has returned."""
        if self._deferred:
            self._offloading_deferred = self._loop.create_task(self._offload_deferred(update), name="waiting gradients")

    async def join_deferred(self) -> None:
        """Wait until all deferred gradients are offloaded. Raises the error that kept one from that."""
        task, self._offloading_deferred = self._offloading_deferred, None
        if task is None:
            return
        try:
            await task
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    async def cancel(self) -> None:
        if self._offloading_deferred is not None:
            self._offloading_deferred.cancel()
            await asyncio.gather(self._offloading_deferred, return_exceptions=True)

    async def _offload_deferred(self, update: int) -> None:
        while self._deferred:  # pop: no other reference may keep the memory of an offloaded gradient
            self._enqueue(self._deferred.pop(0))
        self._enqueue(None)
        await self._serve(update)

    async def _serve(self, update: int) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(update), name="gradient pump")
                group.create_task(self._land(update), name="gradient landing")
        except BaseException as error:
            self._fail(error)
            raise

    def _enqueue(self, request: TransferRequest | None) -> None:
        self._requests.put_nowait(request)
        if self._error is not None:
            self._fail(self._error)

    def _fail(self, error: BaseException) -> None:
        """Fail all queued requests, so that nobody waits for a pump that has ended."""
        self._error = error
        while not self._requests.empty():
            request = self._requests.get_nowait()
            if request is not None:
                request.done.set_exception(MegatrainError(f"gradients no longer move: {error!r}"))

    async def _pump(self, update: int) -> None:
        while (request := await self._requests.get()) is not None:
            try:
                match request:
                    case OffloadGradient():
                        await self._offload(request, update)
                    case OffloadDirections():
                        await self._offload_directions(request, update)
                    case LoadGradient():
                        self._load(request)
                    case LoadMomentum():
                        await self._load_momentum(request, update - 1)
            except BaseException as error:
                if not request.done.done():
                    request.done.set_exception(MegatrainError(f"a gradient could not move: {error!r}"))
                raise
            del request  # drops the last reference to the memory of an offloaded gradient
        await self._in_flight.put(None)

    async def _offload(self, request: OffloadGradient, update: int) -> None:
        if partial := self._incomplete.pop(request.layer, None):
            lease = partial.lease
        else:
            with self._waiting("room", request.layer):
                lease = await self._host.lease(request.layer, update)
            self._device.timeline.stage_waits(Stage.D2H, lease.free_at_s)
        done = self._copy_out(request, "offload", lease.region, [request.after])
        if request.final:
            await self._in_flight.put(_InFlight(lease, done, flat=request.flat))
        else:
            self._incomplete[request.layer] = _InFlight(lease, done)

    async def _offload_directions(self, request: OffloadDirections, update: int) -> None:
        gradient = self._incomplete.pop(request.layer)
        with self._waiting("room", request.layer):
            lease = await self._host.lease_direction(request.layer, update)
        # Copies of a stage run in order, and after one fails so do all later ones. So the gradient is there first.
        done = self._copy_out(request, "complete", lease.region, [gradient.done, request.after])
        await self._in_flight.put(_InFlight(gradient.lease, done, lease))

    def _copy_out(
        self, request: OffloadGradient | OffloadDirections, name: str, region: torch.Tensor, after: Sequence[Event]
    ) -> Event:
        source = request.flat.view(torch.uint8)
        op = Op(name, request.layer, num_bytes=source.nbytes)
        done = self._device.copy(Stage.D2H, region[: source.nbytes], source, op, after)
        request.done.set_result(done)
        return done

    async def _load_momentum(self, request: LoadMomentum, generation: int) -> None:
        after = [] if request.after is None else [request.after.result()]
        with self._waiting("generation", request.layer):
            momentum = await self._host.momentum(request.layer, generation)
        for start, values in momentum:
            op = Op("momentum", request.layer, num_bytes=values.nbytes)
            region = request.region[values.itemsize * start :][: values.nbytes]
            after = [self._device.copy(Stage.H2D, region, values.view(torch.uint8), op, after)]
        request.done.set_result(after[0])

    def _load(self, request: LoadGradient) -> None:
        lease, stored, *_ = self._incomplete[request.layer]
        after = [stored] if request.after is None else [stored, request.after.result()]
        op = Op("fetch", request.layer, num_bytes=request.region.nbytes)
        source = lease.region[: request.region.nbytes]
        request.done.set_result(self._device.copy(Stage.H2D, request.region, source, op, after))

    def _waiting(self, what: str, layer: int) -> AbstractContextManager[None]:
        return self._device.spans.span(Row.GRADIENTS, f"wait {what}", layer, waits=True)

    async def _land(self, update: int) -> None:
        while (flight := await self._in_flight.get()) is not None:
            await self._loop.run_in_executor(None, flight.done.synchronize)
            with self._device.spans.span(Row.LANDINGS, "land", flight.lease.layer):
                await self._host.land(flight.lease, update, flight.done.at_s, flight.directions)
            del flight
