"""Defines the Ray actors of a run as thin wrappers of plain classes.

Weights, gradients and optimizer state never travel through their calls.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.crew.batch_feed import Feed
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.device.rank_group import Meeting, Place
from megatrain_ray.engine.shards.save_gate import SaveAttempt
from megatrain_ray.engine.shards.save_part import WrittenPart
from megatrain_ray.io.arenas.arena import ArenaHandle
from megatrain_ray.io.arenas.arena_holder import Handles
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.planning.prepare import Prepared
from megatrain_ray.run.process_end import wait_gone
from megatrain_ray.spans import RecordedSpans
from megatrain_ray.workers.early_imports import import_first
from megatrain_ray.workers.gpu_worker import GpuWorker
from megatrain_ray.workers.messages import HeldOutLoss, Progress, Seat, StepResult


def waiting(kind: type) -> type:
    """Return a class for actors that start before the arguments of `kind`'s constructor are known.

    Its constructor imports `modules`. Its `take_up` is the constructor of `kind`; nothing else may be called before
    `take_up` has returned.
    """

    def begin(self: Any, modules: Sequence[str] = ()) -> None:
        import_first(modules)

    return type(
        kind.__name__, (kind,), {"__init__": begin, "take_up": vars(kind)["__init__"], "__module__": kind.__module__}
    )


def show_own_gpus() -> None:
    """Let this process see only the GPUs that Ray assigned to it.

    Call it before torch looks for GPUs. Ray itself leaves all GPUs visible if a job sets
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES (deploy/README.md).
    """
    if ids := ray.get_runtime_context().get_accelerator_ids()["GPU"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)


class GpuActor:
    """Runs a GpuWorker on the actor's event loop.

    The actor starts before there is a plan; `take_up` creates the worker. Only `open_meeting` may be called before it.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        show_own_gpus()
        import_first(modules)

    async def open_meeting(self, address: str) -> Place:
        """Open the port at which several GPU workers meet, and return its address. Call it on rank 0 only.

        address: of this host, at which the other workers reach it.
        """
        self._meeting = Meeting(address)
        return self._meeting.place

    async def take_up(
        self,
        prepared: Prepared,
        holders: Sequence[Handles],
        data: Any,
        after_pids: Sequence[int] = (),
        seat: Seat | None = None,
    ) -> None:
        """Create the GPU worker.

        holders: handles of the processes that hold the arenas of the host.
        data: handle of the data actor.
        after_pids: process ids of earlier GPU workers of this host. It waits until they have ended, since only then
            their device memory is free.
        seat: this worker's place among several; None if it is the only one.
        """
        for pid in after_pids:
            await asyncio.to_thread(wait_gone, pid, DEADLINE_S)
        self._feed = Feed(data)
        self._worker = GpuWorker(prepared, holders, self._feed.batch, self._feed.held_out_batch, True, seat)
        self._filled = asyncio.Event()

    async def until_data_dies(self) -> None:
        """Wait until a batch is wanted and the data process has died."""
        await self._feed.until_it_dies()

    async def take_data(self, data: Any) -> None:
        """Use another data process instead of the one that died."""
        await self._feed.take(data)

    async def handles(self) -> dict[str, ArenaHandle]:
        return self._worker.handles()

    async def home_problems(self) -> tuple[str, ...]:
        return self._worker.home_problems

    async def fill(self, save_folder: Path | None, manifest: Manifest | None) -> None:
        await self._worker.fill(save_folder, manifest)
        self._filled.set()

    async def build(self) -> None:
        """Build the engine once `fill` has returned.

        May be called earlier: Ray does not keep the order of calls to an async actor.
        """
        await self._filled.wait()
        await self._worker.build()

    async def write_part(self, save_folder: Path, attempt: SaveAttempt, compression: SaveCompression) -> WrittenPart:
        return await self._worker.write_part(save_folder, attempt, compression)

    async def abandon_save(self, attempt: SaveAttempt) -> None:
        await self._worker.abandon_save(attempt)

    async def base_checksums(self) -> tuple[int | None, ...]:
        return await self._worker.base_checksums()

    async def start(self, progress: Progress) -> None:
        await self._worker.start(progress)
        # A full garbage collection visits half a million objects of torch and Transformers, which takes 0.3 s, while
        # the GPU idles. They live as long as the process, so they are excluded from collections.
        gc.collect()
        gc.freeze()

    async def resume(self, progress: Progress) -> None:
        await self._worker.resume(progress)

    async def step(self, step: int, save: bool) -> StepResult:
        return await self._worker.step(step, save)

    async def evaluate(self, step: int, index: int) -> HeldOutLoss:
        return await self._worker.evaluate(step, index)

    async def spans(self, last: int) -> RecordedSpans:
        return await self._worker.spans(last)

    async def whereabouts(self) -> str:
        return self._worker.whereabouts()

    async def close(self, last: int) -> None:
        await self._worker.close(last)
