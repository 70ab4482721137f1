"""Gradients on the device: sums over micro-batches in flat slots, exact norms, and their way out to the host.

The compute thread adds and measures; the event loop leases room in the slab, submits the copy and tells the sink when
the gradient has landed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

from megatrain_ray.engine.device import DEADLINE_S, Device, Event
from megatrain_ray.engine.layout import ModelLayout
from megatrain_ray.engine.seams import GradSink, Lease
from megatrain_ray.errors import MegatrainError
from megatrain_ray.trace import Op, Stage


class GradientSlots:
    """Regions that layers' gradients occupy in turn: layer `L - 1 - k` takes region `k mod n`, or each its own."""

    def __init__(self, device: Device, sizes_bytes: Sequence[int], num_layers: int, *, poison: bool) -> None:
        self._device = device
        self._poison = poison
        self._regions = [device.allocate(num_bytes) for num_bytes in sizes_bytes]
        self._num_layers = num_layers
        self._empty: list[Future[Event] | None] = [None] * len(self._regions)

    def _index(self, layer: int) -> int:
        if len(self._regions) == self._num_layers:
            return layer
        return (self._num_layers - 1 - layer) % len(self._regions)

    def take(self, layer: int) -> torch.Tensor:
        """The layer's region, to be written once what left it last has left. Compute thread only."""
        index = self._index(layer)
        future = self._empty[index]
        if future is not None:
            with self._device.exposed("d2h"):
                event = future.result(DEADLINE_S)
            self._device.wait(event, "d2h")
        if self._poison:
            self._regions[index].fill_(0xFF)
        return self._regions[index]

    def leave(self, layer: int) -> Future[Event]:
        """The region's gradient is complete; the future gets the event after which it is empty."""
        future: Future[Event] = Future()
        self._empty[self._index(layer)] = future
        return future

    def reset(self) -> None:
        """Between steps: everything has left."""
        self._empty = [None] * len(self._regions)


class Departure(NamedTuple):
    """A complete gradient: memory, the event after which it may be read, and who waits for it to be empty."""

    layer: int
    flat: torch.Tensor
    after: Event
    emptied: Future[Event]


class _InFlight(NamedTuple):
    lease: Lease
    done: Event


class GradientOffloader:
    """Event loop side: departures in, landed gradients out, both in order."""

    def __init__(self, device: Device, sink: GradSink) -> None:
        self._device = device
        self._sink = sink
        self._departures: asyncio.Queue[Departure | None] = asyncio.Queue()
        self._in_flight: asyncio.Queue[_InFlight | None] = asyncio.Queue(maxsize=64)
        self._error: BaseException | None = None

    async def run(self, update: int) -> None:
        """Serves one step: returns when every gradient has landed, after `depart_nowait(None)`."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._submit(), name="d2h pump")
                group.create_task(self._land(update), name="d2h landing")
        except BaseException as error:
            self._fail(error)
            raise

    def depart_nowait(self, departure: Departure | None) -> None:
        """Event loop only; None says that the step has no more."""
        self._departures.put_nowait(departure)
        if self._error is not None:
            self._fail(self._error)

    def _fail(self, error: BaseException) -> None:
        """Whoever waits for a region to be empty must not wait for a pump that is gone."""
        self._error = error
        while not self._departures.empty():
            departure = self._departures.get_nowait()
            if departure is not None:
                departure.emptied.set_exception(MegatrainError(f"gradients no longer leave the device: {error!r}"))

    async def _submit(self) -> None:
        while (departure := await self._departures.get()) is not None:
            lease = await self._sink.lease(departure.layer)
            op = Op("offload", departure.layer, num_bytes=departure.flat.nbytes)
            done = self._device.copy(Stage.D2H, lease.flat, departure.flat, op, [departure.after])
            departure.emptied.set_result(done)
            await self._in_flight.put(_InFlight(lease, done))
        await self._in_flight.put(None)

    async def _land(self, update: int) -> None:
        loop = asyncio.get_running_loop()
        while (flight := await self._in_flight.get()) is not None:
            await loop.run_in_executor(None, flight.done.synchronize)
            await self._sink.land(flight.lease, update, flight.done.at_s)


class GradientStore:
    """Compute thread side: one flat sum a layer, from first contribution to departure."""

    def __init__(self, layout: ModelLayout, sums: GradientSlots, sum_dtype: torch.dtype, leaving: GradientSlots | None,
                 wire_dtype: torch.dtype) -> None:  # fmt: skip
        self._layout = layout
        self._sums = sums
        self._sum_dtype = sum_dtype
        self._leaving = leaving
        self._wire_dtype = wire_dtype
        self._open: dict[int, torch.Tensor] = {}
        self.norms: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        self._sums.reset()
        if self._leaving is not None:
            self._leaving.reset()
        self._open.clear()
        self.norms.clear()

    def add(self, layer: int, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Adds one micro-batch's gradients of a layer. A parameter that got none contributes zeros."""
        flat_layout = self._layout.layers[layer]
        first = layer not in self._open
        if first:
            region = self._sums.take(layer)
            self._open[layer] = region[: flat_layout.size * self._sum_dtype.itemsize].view(self._sum_dtype)
        for segment in flat_layout.owned:
            target = flat_layout.view(self._open[layer], segment.name)
            gradient = gradients.get(segment.name)
            if gradient is None:
                if first:
                    target.zero_()
            elif first:
                target.copy_(gradient)
            else:
                target.add_(gradient)

    def finish(self, layer: int, device: Device) -> Departure:
        """Rounds where asked, measures each parameter's norm (of what the optimizer receives, in FP32), lets go."""
        flat, emptied = self._rounded(layer)
        flat_layout = self._layout.layers[layer]
        for segment in flat_layout.owned:
            view = flat_layout.view(flat, segment.name)
            self.norms[segment.name] = torch.linalg.vector_norm(view, dtype=torch.float32)
        return Departure(layer, flat, device.record(), emptied)

    def _rounded(self, layer: int) -> tuple[torch.Tensor, Future[Event]]:
        total = self._open.pop(layer)
        if self._leaving is None:
            return total, self._sums.leave(layer)
        region = self._leaving.take(layer)
        flat = region[: total.numel() * self._wire_dtype.itemsize].view(self._wire_dtype)
        flat_layout = self._layout.layers[layer]
        for segment in flat_layout.owned:  # not the padding: it was never written
            flat_layout.view(flat, segment.name).copy_(flat_layout.view(total, segment.name))
        return flat, self._leaving.leave(layer)

    def total_norm(self) -> torch.Tensor:
        """The norm of the parameters' norms, in the order of `model.parameters()`, as torch takes it."""
        norms = torch.stack([self.norms[name] for name in self._layout.parameter_order])
        total: torch.Tensor = torch.linalg.vector_norm(norms)
        return total
