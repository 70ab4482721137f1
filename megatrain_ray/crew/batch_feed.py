"""Feed: how batches come from the data process, whichever that is now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError

from megatrain_ray.io.batching.batch_stream import Batch


class Feed:
    """Of one GPU worker. A batch whose data process died is asked for again once there is another one; whoever waits
    for it sets a bound. One event loop."""

    def __init__(self, data: Any) -> None:
        """`data`: handle of the data actor."""
        self._data = data
        self._changed = asyncio.Condition()
        self._is_dead = False

    async def batch(self, step: int) -> Batch:
        """The batch of a step."""
        return await self._ask(lambda data: data.batch.remote(step))

    async def held_out_batch(self, index: int) -> Batch:
        """A batch of the held-out data, by number."""
        return await self._ask(lambda data: data.held_out_batch.remote(index))

    async def until_it_dies(self) -> None:
        """Returns once a batch was asked for and the data process had died."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_dead)

    async def take(self, data: Any) -> None:
        """Another one, in the place of the one that died."""
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
