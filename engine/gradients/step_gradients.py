"""When gradients of a step leave the device: most of them in its backward; those that waited there until the scale of a
clipped update was known beside the next forward. Event loop only, unless a method says otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from megatrain_ray.engine.device.task_failures import first_failure
from megatrain_ray.engine.gradients.gradient_offloader import Departure, GradientOffloader, Transfer


class StepGradients:
    """One step after the other: `move` beside its compute until `end_step`, then `send_waiting`."""

    def __init__(self, offloader: GradientOffloader) -> None:
        self._offloader = offloader
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Departure] = []
        self._leaving: asyncio.Task[None] | None = None  # of those that waited

    def transfer(self, transfer: Transfer) -> None:
        """From the compute thread: submits it."""
        self._loop.call_soon_threadsafe(self._offloader.submit_nowait, transfer)

    def keep_waiting(self, departures: Iterable[Departure]) -> None:
        """From the compute thread: these are for `send_waiting`."""
        self._waiting = list(departures)

    async def move(self, update: int) -> None:
        """Moves what is submitted for this update, after all of the update before."""
        await self.all_left()
        await self._offloader.run(update)

    def end_step(self) -> None:
        """The step submits no more."""
        self._offloader.submit_nowait(None)

    def send_waiting(self, update: int) -> None:
        """Begins to, once `move` has returned."""
        if self._waiting:
            self._leaving = self._loop.create_task(self._send(update), name="waiting gradients")

    async def _send(self, update: int) -> None:
        """As the shards make room."""
        while self._waiting:  # nothing else may keep the memory of one that has left
            self._offloader.submit_nowait(self._waiting.pop(0))
        self._offloader.submit_nowait(None)
        await self._offloader.run(update)

    async def all_left(self) -> None:
        """Raises what kept a gradient from leaving."""
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            return
        try:
            await leaving
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    async def cancel(self) -> None:
        """Idempotent."""
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.gather(self._leaving, return_exceptions=True)
