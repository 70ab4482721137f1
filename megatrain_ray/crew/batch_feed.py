"""Fetches batches from the current data process, also after that was replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError

from megatrain_ray.io.batching.batch_stream import Batch


class Feed:
    """Fetches the batches of one GPU worker.

    If the data process dies, the batch is requested again from its replacement. That wait has no bound: the caller sets
    one. Use it on one event loop only.
    """

    def __init__(self, data: Any) -> None:
        """Fetch from the actor `data`, which is a Ray handle."""
        self._data = data
        self._changed = asyncio.Condition()
        self._is_dead = False

    async def batch(self, step: int) -> Batch:
        """Return the batch of a step."""
        return await self._ask(lambda data: data.batch.remote(step))

    async def held_out_batch(self, index: int) -> Batch:
        """Return a batch of the held-out data, by its number."""
        return await self._ask(lambda data: data.held_out_batch.remote(index))

    async def until_it_dies(self) -> None:
        """Wait until a batch was requested and the data process had died."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_dead)

    async def take(self, data: Any) -> None:
        """Replace the data process that died by `data`, and request the missing batches from it."""
        async with self._changed:
            self._data, self._is_dead = data, False
            self._changed.notify_all()

    async def _ask(self, call: Callable[[Any], Any]) -> Batch:
        while True:
            asked = self._data
            try:
                batch: Batch = await call(asked)
            except RayActorError:
                await self._followed(asked)
            else:
                return batch

    async def _followed(self, dead: Any) -> None:
        async with self._changed:
            if self._data is dead:
                self._is_dead = True
                self._changed.notify_all()
                await self._changed.wait_for(lambda: self._data is not dead)
