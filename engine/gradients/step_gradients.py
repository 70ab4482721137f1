"""Decides when the gradients of a step leave the device.

Most leave in the step's backward. Gradients that waited on the device for the scale of a clipped update leave
concurrently with the next forward. Event loop only, unless a method says otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from megatrain_ray.engine.device.task_failures import first_failure
from megatrain_ray.engine.gradients.gradient_offloader import Departure, GradientOffloader, Transfer


class StepGradients:
    """Moves the gradients of one step after the other.

    `move` runs concurrently with the step's compute until `end_step`. Then comes `send_waiting`.
    """

    def __init__(self, offloader: GradientOffloader) -> None:
        self._offloader = offloader
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Departure] = []
        self._leaving: asyncio.Task[None] | None = None  # the task of `send_waiting`

    def transfer(self, transfer: Transfer) -> None:
        """Submit a transfer. Call from the compute thread."""
        self._loop.call_soon_threadsafe(self._offloader.submit_nowait, transfer)

    def keep_waiting(self, departures: Iterable[Departure]) -> None:
        """Store these requests for `send_waiting`. Call from the compute thread."""
        self._waiting = list(departures)

    async def move(self, update: int) -> None:
        """Run the transfers that are submitted for this update, after all those of the update before."""
        await self.all_left()
        await self._offloader.run(update)

    def end_step(self) -> None:
        """Say that the step submits no more transfers."""
        self._offloader.submit_nowait(None)

    def send_waiting(self, update: int) -> None:
        """Start to offload the gradients that waited on the device. Call after `move` has returned."""
        if self._waiting:
            self._leaving = self._loop.create_task(self._send(update), name="waiting gradients")

    async def _send(self, update: int) -> None:
        """Offload the waiting gradients one by one, as the shards make room for them."""
        while self._waiting:  # pop: no other reference may keep the memory of an offloaded gradient
            self._offloader.submit_nowait(self._waiting.pop(0))
        self._offloader.submit_nowait(None)
        await self._offloader.run(update)

    async def all_left(self) -> None:
        """Wait until all waiting gradients have been offloaded.

        Raises the error that kept one from that.
        """
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            return
        try:
            await leaving
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    async def cancel(self) -> None:
        """Cancel the offload of waiting gradients. Idempotent."""
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.gather(self._leaving, return_exceptions=True)
