"""Runs the host side in one process: shards as plain objects, updates in a thread, accounted on the virtual clock."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import torch

from megatrain_ray.engine.device.device import Event
from megatrain_ray.engine.host.gradient_slab import GradientSlab
from megatrain_ray.engine.host.interfaces import EVERY_GENERATION, HostWeights, Lease, MomentumPart
from megatrain_ray.engine.host.shared_host import Momenta, WorkingArena
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.optimizer.undo_log import serial_of
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.planner.cost.simulated_buffers import SimulatedSlab, SimulatedSpill, SimulatedUploadBuffers
from megatrain_ray.engine.shards.adam_shard import AdamShard
from megatrain_ray.engine.spill.disk_weights import DiskWeights
from megatrain_ray.virtual_clock import Op, Stage, Timeline


class _Landing(NamedTuple):
    gradient: Lease
    directions: Lease | None
    at_s: float


class LocalHost:
    """Is a Host over shards of this process. Build it and use it on the event loop."""

    def __init__(
        self,
        plan: Plan,
        layout: ModelLayout,
        working: torch.Tensor,
        shards: Sequence[AdamShard],
        timeline: Timeline,
        generation: int = 0,
        disk: DiskWeights | None = None,
    ) -> None:
        """Start the task that makes the updates.

        working: 1-D, the working copies in host memory, one after the other.
        generation: number of updates already in the working copies.
        disk: the other working copies, if there are any.
        """
        self._layout = layout
        self._arena = WorkingArena(plan, layout, working)
        self._disk = disk
        self._shards = shards
        self._timeline = timeline
        self._order = plan.layer_order
        slab = torch.empty(plan.gradients.slab_bytes, dtype=torch.uint8)
        sizes = layout.gradient_bytes(plan.gradients.slab_itemsize, plan.never_in_slab)
        self._error: BaseException | None = None
        self._slab = GradientSlab(slab, sizes, self._check, passing=plan.slab_transit_layers)
        self._room = SimulatedSlab(plan, layout)
        self._stored = plan.gradients_on_disk
        directions = torch.empty(plan.gradients.direction_slab_bytes, dtype=torch.uint8)
        self._directions = GradientSlab(directions, layout.direction_bytes, self._check)
        self._offload_dtype = plan.gradients.offload_dtype
        self._generations = [generation if i in self._order else EVERY_GENERATION for i in range(len(layout.layers))]
        self._spill = SimulatedSpill(plan, layout, lambda stage, op, *after: timeline.account(stage, op, after))
        self._windows = SimulatedUploadBuffers(
            plan, layout, lambda stage, op, *after: timeline.account(stage, op, after)
        )
        self._begun = contextvars.copy_context()  # when reading ahead began, on the virtual clock
        self._ready_at_s = [0.0] * len(layout.layers)
        self._headers: dict[int, tuple[UpdateParams, float]] = {}
        self._landed: dict[tuple[int, int], _Landing] = {}
        self._changed = asyncio.Condition()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="optimizer")
        self._next = generation + 1
        self._task = asyncio.create_task(self._serve(), name="local optimizer")

    def expect(self, fragments: Sequence[FragmentId], generation: int) -> None:
        self._begun = contextvars.copy_context()
        if self._disk is not None:
            self._disk.expect(fragments, generation, self._written)

    async def fetch(self, fragment: FragmentId, generation: int) -> HostWeights:
        layer = fragment.layer
        await self._reached(layer, generation)
        disk = self._disk_of(layer)
        parts = [self._arena.part(fragment)] if disk is None else await disk.take(fragment)
        return HostWeights(parts, self._begun.run(self._windows.read, fragment, self._ready_at_s[layer], 0.0))

    def release(self, fragment: FragmentId, uploaded: Event) -> None:
        self._windows.release(fragment, uploaded.at_s)
        if disk := self._disk_of(fragment.layer):
            disk.release(uploaded)

    def _disk_of(self, layer: int) -> DiskWeights | None:
        return self._disk if self._disk is not None and layer in self._disk.layers else None

    async def _written(self, layer: int, generation: int) -> None:
        """Wait until the layer's working copy of this generation is on disk."""
        assert self._disk is not None
        await self._reached(layer, generation)
        while not self._disk.are_written(layer):
            self._check()
            await asyncio.sleep(0.001)

    async def _reached(self, layer: int, generation: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._error or self._generations[layer] >= generation)
        if self._error:
            raise self._error

    async def momentum(self, layer: int, generation: int) -> Sequence[MomentumPart]:
        await self._reached(layer, generation)
        momenta = Momenta([shard.layout for shard in self._shards], [shard.m for shard in self._shards])
        return momenta.of(layer, self._layout.layers[layer].trained)

    async def lease(self, layer: int, update: int) -> Lease:
        lease = await self._slab.lease(layer)
        return replace(lease, free_at_s=self._room.allocate(layer))

    async def lease_direction(self, layer: int, update: int) -> Lease:
        return await self._directions.lease(layer)

    async def land(self, lease: Lease, update: int, at_s: float, direction: Lease | None = None) -> None:
        async with self._changed:
            self._landed[update, lease.layer] = _Landing(lease, direction, at_s)
            self._changed.notify_all()

    async def commit(self, header: UpdateParams, at_s: float) -> None:
        if not self._order:
            return
        async with self._changed:
            self._headers[header.update] = (header, at_s)
            self._changed.notify_all()

    async def drain(self, generation: int) -> None:
        """Wait until every layer has this generation."""
        for layer in range(len(self._layout.layers)):
            await self._reached(layer, generation)

    async def close(self) -> None:
        if self._disk is not None:
            await self._disk.close()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._executor.shutdown()

    async def _serve(self) -> None:
        try:
            while self._order:  # or everything lives on the device
                await self._update(self._next)
                self._next += 1
        except Exception as error:
            async with self._changed:
                self._error = error
                self._changed.notify_all()
            await self._slab.wake()  # nobody gives room back any more
            await self._directions.wake()

    def _check(self) -> None:
        if self._error:
            raise self._error

    async def _landing(self, update: int, layer: int) -> _Landing:
        async with self._changed:
            await self._changed.wait_for(lambda: (update, layer) in self._landed)
            return self._landed.pop((update, layer))

    async def _header(self, update: int) -> tuple[UpdateParams, float]:
        async with self._changed:
            await self._changed.wait_for(lambda: update in self._headers)
            return self._headers[update]

    def _gradient(self, landing: _Landing) -> torch.Tensor:
        num_bytes = self._layout.layers[landing.gradient.layer].trained.size * self._offload_dtype.itemsize
        return landing.gradient.region[:num_bytes].view(self._offload_dtype)

    async def _store(self, update: int) -> dict[int, float]:
        """Store the gradients that wait on disk as they arrive, and return when each was in the slab, by layer."""
        loop = asyncio.get_running_loop()
        landed_s = {}
        for layer in self._stored:
            landing = await self._landing(update, layer)
            for shard in self._shards:
                await loop.run_in_executor(self._executor, shard.store, layer, self._gradient(landing))
            landed_s[layer] = landing.at_s
            await self._release(layer, self._spill.store(layer, landing.at_s))
        return landed_s

    async def _release(self, layer: int, at_s: float) -> None:
        self._room.release(layer, at_s)
        await self._slab.release(layer)

    async def _update(self, update: int) -> None:
        loop = asyncio.get_running_loop()
        stored_s = await self._store(update)
        header, committed_s = await self._header(update)
        for layer in self._order:
            landing = None if layer in stored_s else await self._landing(update, layer)
            gradient = self._gradient(landing) if landing else None
            directions = landing.directions if landing else None
            moved = None if directions is None else directions.region.view(torch.bfloat16)
            serial = serial_of(update, layer, len(self._layout.layers))
            for shard in self._shards:
                await loop.run_in_executor(self._executor, shard.update, layer, gradient, header, serial, moved)
            wanted_s = max(committed_s, landing.at_s if landing else stored_s[layer])
            after = (wanted_s, self._spill.load(layer, wanted_s))
            updated_s = self._timeline.account(Stage.OPTIMIZER, Op("update", layer), after)
            self._ready_at_s[layer] = self._spill.write_back(layer, updated_s)
            if landing:
                await self._release(layer, updated_s)
            if directions is not None:
                await self._directions.release(layer)
            async with self._changed:
                self._generations[layer] = update
                self._changed.notify_all()
        del self._headers[update]
