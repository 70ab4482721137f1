"""Host side in one process: shards as plain objects, updates in a thread, accounted on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from megatrain_ray.engine.journal import serial_of
from megatrain_ray.engine.layout import ModelLayout
from megatrain_ray.engine.momenta import Momenta, MomentumPart
from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.seams import EVERY_GENERATION, HostWeights, Lease
from megatrain_ray.engine.shard import AdamShard, UpdateHeader
from megatrain_ray.engine.simulated_spill import SimulatedSpill
from megatrain_ray.engine.slab import SlabPool
from megatrain_ray.trace import Op, Stage, Timeline


class _Landing(NamedTuple):
    gradient: Lease
    directions: Lease | None
    at_s: float


class LocalHost:
    """ParamSource and GradSink over shards of this process. Build and use on the event loop."""

    def __init__(
        self,
        plan: Plan,
        layout: ModelLayout,
        working: torch.Tensor,
        shards: Sequence[AdamShard],
        timeline: Timeline,
        generation: int = 0,
    ) -> None:
        """`working`: 1-D, the working copies of the layers on the host, one after the other. `generation`: updates
        already in it."""
        self._layout = layout
        self._starts = layout.starts_among(plan.host_layers)
        self._working = working
        self._shards = shards
        self._timeline = timeline
        self._order = plan.layer_order
        slab = torch.empty(plan.slab_bytes, dtype=torch.uint8)
        self._slab = SlabPool(slab, layout.gradient_bytes(plan.slab_itemsize, plan.never_in_slab))
        directions = torch.empty(plan.direction_slab_bytes, dtype=torch.uint8)
        self._directions = SlabPool(directions, layout.direction_bytes)
        self._wire_dtype = plan.wire_dtype
        self._generations = [generation if i in self._order else EVERY_GENERATION for i in range(len(layout.layers))]
        self._spill = SimulatedSpill(plan, layout, lambda stage, op, *after: timeline.account(stage, op, after))
        self._ready_at_s = [0.0] * len(layout.layers)
        self._headers: dict[int, tuple[UpdateHeader, float]] = {}
        self._landed: dict[tuple[int, int], _Landing] = {}
        self._changed = asyncio.Condition()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="optimizer")
        self._next = generation + 1
        self._error: BaseException | None = None
        self._task = asyncio.create_task(self._serve(), name="local optimizer")

    async def fetch(self, layer: int, generation: int) -> HostWeights:
        async with self._changed:
            await self._changed.wait_for(lambda: self._error or self._generations[layer] >= generation)
        if self._error:
            raise self._error
        start = self._starts[layer]
        flat = self._working[start : start + self._layout.layers[layer].size]
        return HostWeights(flat, self._ready_at_s[layer])

    async def momentum(self, layer: int, generation: int) -> Sequence[MomentumPart]:
        await self.fetch(layer, generation)
        momenta = Momenta([shard.layout for shard in self._shards], [shard.m for shard in self._shards])
        return momenta.of(layer)

    async def lease(self, layer: int) -> Lease:
        return await self._slab.lease(layer)

    async def lease_direction(self, layer: int) -> Lease:
        return await self._directions.lease(layer)

    async def land(self, lease: Lease, update: int, at_s: float, direction: Lease | None = None) -> None:
        async with self._changed:
            self._landed[update, lease.layer] = _Landing(lease, direction, at_s)
            self._changed.notify_all()

    async def commit(self, header: UpdateHeader, at_s: float) -> None:
        if not self._order:
            return
        async with self._changed:
            self._headers[header.update] = (header, at_s)
            self._changed.notify_all()

    async def drain(self, generation: int) -> None:
        """Waits until every layer has this generation."""
        for layer in range(len(self._layout.layers)):
            await self.fetch(layer, generation)

    async def close(self) -> None:
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

    async def _landing(self, update: int, layer: int) -> _Landing:
        async with self._changed:
            await self._changed.wait_for(lambda: update in self._headers and (update, layer) in self._landed)
            return self._landed.pop((update, layer))

    async def _update(self, update: int) -> None:
        loop = asyncio.get_running_loop()
        for layer in self._order:
            landing = await self._landing(update, layer)
            header, committed_s = self._headers[update]
            num_bytes = self._layout.layers[layer].trained.size * self._wire_dtype.itemsize
            gradient = landing.gradient.region[:num_bytes].view(self._wire_dtype)
            moved = None if landing.directions is None else landing.directions.region.view(torch.bfloat16)
            serial = serial_of(update, layer, len(self._layout.layers))
            for shard in self._shards:
                await loop.run_in_executor(self._executor, shard.update, layer, gradient, header, serial, moved)
            after = (committed_s, landing.at_s, self._spill.bring(layer))
            self._ready_at_s[layer] = self._timeline.account(Stage.OPTIMIZER, Op("update", layer), after)
            self._spill.leave(layer, self._ready_at_s[layer])
            await self._slab.release(layer)
            if landing.directions is not None:
                await self._directions.release(layer)
            async with self._changed:
                self._generations[layer] = update
                self._changed.notify_all()
        del self._headers[update]
