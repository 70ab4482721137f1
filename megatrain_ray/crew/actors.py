"""Defines the Ray actor of a GPU worker as a thin wrapper of a plain class.

Weights, gradients and optimizer state never travel through its calls.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.device.rank_group import Meeting, Rendezvous
from megatrain_ray.errors import NotPreparedError
from megatrain_ray.io.arenas.arena_holder import Handles
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.run.run_processes import wait_gone
from megatrain_ray.workers.gpu_worker import GpuWorker
from megatrain_ray.workers.messages import Progress, RankInfo

ASK_AGAIN_S = 0.2  # seconds between two requests for a batch whose data are being fetched


class BatchFeed:
    """Fetches the batches of one GPU worker.

    If the data process dies, the batch is requested again from its replacement. So it is if its data are not there yet.
    These waits have no bound: the caller sets one. Use it on one event loop only.
    """

    def __init__(self, data: Any) -> None:
        self._data = data  # handle of the actor
        self._changed = asyncio.Condition()
        self._is_dead = False

    async def batch(self, step: int) -> Batch:
        return await self._ask(lambda data: data.batch.remote(step))

    async def held_out_batch(self, index: int) -> Batch:
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
            except RayTaskError as error:
                if not isinstance(error.cause, NotPreparedError):
                    raise
                await asyncio.sleep(ASK_AGAIN_S)
            else:
                return batch

    async def _followed(self, dead: Any) -> None:
        async with self._changed:
            if self._data is dead:
                self._is_dead = True
                self._changed.notify_all()
                await self._changed.wait_for(lambda: self._data is not dead)


class GpuActor(GpuWorker):
    """Runs a GpuWorker on the actor's event loop. Only `open_meeting` may be called before `setup`."""

    async def open_meeting(self, address: str) -> Rendezvous:
        """Open the port at which several GPU workers meet, on rank 0. `address`: at which they reach this host."""
        self._meeting = Meeting(address)
        return self._meeting.place

    async def setup(
        self, run_spec: RunSpec, holders: Sequence[Handles], data: Any, after_pids: Sequence[int],
        rank_info: RankInfo | None,
    ) -> int:  # fmt: skip
        """Become the GPU worker and return the process id. `data`: handle of the data actor."""
        for pid in after_pids:  # earlier GPU workers of this host: their device memory is free once they have ended
            await asyncio.to_thread(wait_gone, pid, DEADLINE_S)
        self._feed = BatchFeed(data)
        super().__init__(run_spec, holders, self._feed.batch, self._feed.held_out_batch, True, rank_info)
        self._filled = asyncio.Event()
        return os.getpid()

    async def until_data_dies(self) -> None:
        await self._feed.until_it_dies()

    async def take_data(self, data: Any) -> None:
        await self._feed.take(data)

    async def fill(self, save_folder: Path | None, manifest: Manifest | None) -> None:
        await super().fill(save_folder, manifest)
        self._filled.set()

    async def build(self) -> None:
        await self._filled.wait()  # Ray does not keep the order of calls to an async actor
        await super().build()

    async def close(self, last: int = 0) -> None:
        """Wait until step `last` and its update are over on this rank too. The process is about to be killed.

        The kernel releases its memory faster than it could itself, which would unpin host memory for many seconds.
        """
        await self._started.finish(last)
        if self._group:
            self._group.close()

    async def start(self, progress: Progress) -> None:
        await super().start(progress)
        # A full garbage collection visits half a million objects of torch and Transformers, which takes 0.3 s, while
        # the GPU idles. They live as long as the process, so they are excluded from collections.
        gc.collect()
        gc.freeze()
