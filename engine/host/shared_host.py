"""Gives the engine weights from shared memory, and the optimizer shards' processes its gradients.

Working copies and gradients lie in shared arenas, and the shards are signalled by words in shared memory. The ranks of
one host share all of it: the first one decides for all where gradients lie, and commits updates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from megatrain_ray.engine.device.device import Event
from megatrain_ray.engine.device.ranks import RankParts
from megatrain_ray.engine.host.gradient_slab import FollowerSlab, GradientSlab, Slab, held_slab_bytes
from megatrain_ray.engine.host.interfaces import HostWeights, Lease, MomentumPart
from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.host.signal_words import SlabRegion
from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.model_layout import DIRECTION_BYTES, ModelLayout, WeightPart
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.spill.disk_weights import DiskWeights
from megatrain_ray.errors import DeadlineError, MegatrainError


class WorkingArena:
    """Locates the working copies of layers that stream and are not on disk, as far as this host has them."""

    def __init__(self, plan: Plan, layout: ModelLayout, working: torch.Tensor) -> None:
        """Use `working`: these layers one after another, 1-D, ModelLayout.size_among(these layers) elements."""
        self._layout = layout
        self._starts = layout.starts_among(plan.weights_on_host)
        self._working = working

    def of_layer(self, layer: int) -> torch.Tensor:
        """Return everything that the host has of a layer: 1-D, padded."""
        return self._working[self._starts[layer] :][: self._layout.shares[layer].size]

    def part(self, fragment: FragmentId) -> WeightPart:
        """Return a fragment as one part. There must be a single host, which has all of it."""
        return self.of_span(fragment.layer, self._layout.layers[fragment.layer].fragments[fragment.index])

    def of_span(self, layer: int, span: ElementRange) -> WeightPart:
        """Return a span (padded) of what the host has of a layer.

        If the host does not have the whole layer, the span must be all trained or all frozen.
        """
        start = self._layout.shares[layer].position(span.start)
        return WeightPart(span.start, self.of_layer(layer)[start : start + span.size])


class Momenta:
    """Finds first moments in the state of all shards. They are read for Muon's orthogonalisation only."""

    def __init__(self, layouts: Sequence[ShardLayout], tensors: Sequence[torch.Tensor]) -> None:
        """Use m of each shard: 1-D fp32 of ShardLayout.size elements."""
        self._shards = tuple(zip(layouts, tensors, strict=True))

    def of(self, layer: int, span: ElementRange) -> list[MomentumPart]:
        """Return parts that together hold the first moments of a span (padded) of the layer."""
        found = []
        for layout, m in self._shards:
            held, own = layout.spans[layer], m[layout.slice(layer)]
            start, stop = max(held.start, span.start), min(held.stop, span.stop)
            if start < stop:
                found.append(MomentumPart(start - span.start, own[start - held.start : stop - held.start]))
        # One without elements for an empty span: a fetch waits for the end of the last part's copy.
        return found or [MomentumPart(0, self._shards[0][1][:0])]


WATCH_SLICE_S = 0.5  # longest sleep of the watcher before it checks whether it should stop


class SharedHost:
    """Serves a GPU worker as its Host. Build and use it on one event loop.

    A watcher thread sleeps on the shards' bell and wakes the loop. So a generation costs the loop one wake-up, not
    polling.
    """

    def __init__(
        self, plan: Plan, layout: ModelLayout, working: torch.Tensor, slab: torch.Tensor, words: SharedUpdateState,
        momenta: Momenta, disk: DiskWeights | None = None, rank: int = 0,
    ) -> None:  # fmt: skip
        """Attach to the shared memory and start the watcher.

        layout: layout of this host.
        working: 1-D, the working copies in host memory, one after another.
        slab: 1-D uint8, gradients and then Muon's directions.
        disk: the working copies that are on disk, if there are any.
        rank: this worker's number among the ranks of all hosts.
        """
        self._host_rank = rank % plan.hosts.gpus_per_host
        self._num_ranks = plan.hosts.gpus_per_host
        self._uploads_parts = plan.slots.gathered
        self._parts = RankParts(layout, rank, plan.hosts.num_gpus)
        self._itemsize = plan.gradients.slab_itemsize
        self._layout = layout
        self._arena = WorkingArena(plan, layout, working)
        self._disk = disk
        self._words = words
        self._deadline_s = plan.update_deadline_s
        self._momenta = momenta
        self._stored = frozenset(plan.gradients_on_disk)
        held = held_slab_bytes(plan, layout)
        sizes = layout.gradient_bytes(plan.gradients.slab_itemsize, plan.never_in_slab)
        passing, aliased = plan.slab_transit_layers, held < plan.gradients.slab_bytes
        self._gradients = GradientSlab(slab[:held], sizes, self._check, passing=passing, aliased=aliased)
        self._directions = GradientSlab(slab[held:], layout.direction_bytes, self._check, start=held)
        self._slabs: dict[SlabRegion, Slab] = {
            SlabRegion.GRADIENT: self._gradients,
            SlabRegion.DIRECTIONS: self._directions,
        }
        if self._host_rank > 0:
            self._slabs = {
                what: FollowerSlab(slab, of_layers, partial(words.gradients.placed_at, what), self._check)
                for what, of_layers in ((SlabRegion.GRADIENT, sizes), (SlabRegion.DIRECTIONS, layout.direction_bytes))
            }
        self._held: dict[int, int] = {}  # first rank: updates that have not consumed a landed gradient yet, by layer
        self._changed = asyncio.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="generation watcher")
        self._task = asyncio.create_task(self._watch(), name="generation watcher")

    def expect(self, fragments: Sequence[FragmentId], generation: int) -> None:
        if self._disk is not None:
            self._disk.expect(fragments, generation, self._written)

    async def fetch(self, fragment: FragmentId, generation: int) -> HostWeights:
        """Wait until the layer has this generation, and return the fragment's weights.

        Raises DeadlineError if the generation does not come, MegatrainError if a shard failed.
        """
        if disk := self._disk_of(fragment.layer):
            return HostWeights(await disk.take(fragment), 0.0)
        await self._reached(fragment.layer, generation)
        if self._uploads_parts:
            own = self._parts.upload_spans(fragment.layer)
            return HostWeights([self._arena.of_span(fragment.layer, span) for span in own], 0.0)
        return HostWeights([self._arena.part(fragment)], 0.0)

    def release(self, fragment: FragmentId, uploaded: Event) -> None:
        if disk := self._disk_of(fragment.layer):
            disk.release(uploaded)

    def _disk_of(self, layer: int) -> DiskWeights | None:
        return self._disk if self._disk is not None and layer in self._disk.layers else None

    async def momentum(self, layer: int, generation: int) -> Sequence[MomentumPart]:
        await self._reached(layer, generation)
        return self._momenta.of(layer, self._parts.gradient_span(layer))

    async def lease(self, layer: int, update: int) -> Lease:
        return self._own_part(await self._lease(SlabRegion.GRADIENT, layer, update), self._itemsize)

    async def lease_direction(self, layer: int, update: int) -> Lease:
        return self._own_part(await self._lease(SlabRegion.DIRECTIONS, layer, update), DIRECTION_BYTES)

    async def _lease(self, what: SlabRegion, layer: int, update: int) -> Lease:
        """Wait for a lease on the part of the slab that all ranks of the host share for this layer."""
        is_first = self._host_rank == 0
        try:
            async with asyncio.timeout(self._deadline_s):
                lease = await self._slabs[what].lease(layer, update)
        except TimeoutError:
            waited = f"for the {what.name.lower()} of layer {layer} within {self._deadline_s:.0f} s"
            if is_first:
                raise DeadlineError(f"no room {waited}: the optimizer shards do not get on") from None
            raise DeadlineError(f"no place {waited}: the first GPU worker of the host does not get on") from None
        if is_first and self._num_ranks > 1:
            self._words.gradients.place(what, layer, update, lease.start_bytes)
        return lease

    def _own_part(self, lease: Lease, itemsize: int) -> Lease:
        """Return the lease with only this rank's part as its region. An element there has `itemsize` bytes."""
        if self._num_ranks == 1:
            return lease
        first = self._layout.shares[lease.layer].trained.start
        start, stop = (itemsize * (edge - first) for edge in self._parts.gradient_span(lease.layer))
        return replace(lease, region=lease.region[start:stop])

    async def land(self, lease: Lease, update: int, at_s: float, direction: Lease | None = None) -> None:
        if self._host_rank == 0:
            self._held[lease.layer] = update
        directions = direction.start_bytes if direction else 0
        self._words.gradients.land(lease.layer, update, lease.start_bytes, directions, self._host_rank)

    async def commit(self, params: UpdateParams, at_s: float) -> None:
        if self._host_rank == 0:
            self._words.updates.commit(params)

    async def drain(self, generation: int) -> None:
        for layer in range(len(self._layout.layers)):
            await self._reached(layer, generation)

    async def close(self) -> None:
        self._closed = True
        if self._disk is not None:
            await self._disk.close()
        await self._task
        self._executor.shutdown()

    async def _reached(self, layer: int, generation: int) -> None:
        if self._words.generations.of_layer(layer) < generation:
            await self._wait(layer, generation, lambda: True)

    async def _written(self, layer: int, generation: int) -> None:
        """Wait until the layer has this generation and the disk has it too."""
        assert self._disk is not None
        await self._wait(layer, generation, partial(self._disk.are_written, layer))

    async def _wait(self, layer: int, generation: int, is_complete: Callable[[], bool]) -> None:
        def arrived() -> bool:
            self._check()
            return self._words.generations.of_layer(layer) >= generation and is_complete()

        try:
            async with asyncio.timeout(self._deadline_s), self._changed:
                await self._changed.wait_for(arrived)
        except TimeoutError:
            raise self._words.generations.late(layer, generation, self._deadline_s) from None

    def _check(self) -> None:
        self._words.check()
        if self._error is not None:
            raise MegatrainError(f"the watcher of the shards' signals ended: {self._error!r}")

    async def _watch(self) -> None:
        try:
            await self._pass_on_bells()
        except BaseException as error:
            self._error = error
            raise
        finally:
            await self._wake()

    async def _wake(self) -> None:
        for slab in self._slabs.values():
            await slab.wake()
        async with self._changed:
            self._changed.notify_all()

    async def _pass_on_bells(self) -> None:
        loop = asyncio.get_running_loop()
        seen = self._words.generation_bell()
        while not self._closed:
            seen = await loop.run_in_executor(self._executor, self._words.wait_generation_bell, seen, WATCH_SLICE_S)
            for layer, update in list(self._held.items()):
                done = self._words.gradients.stored if layer in self._stored else self._words.generations.of_layer
                if done(layer) >= update:
                    del self._held[layer]
                    await self._gradients.release(layer)
                    if self._layout.layers[layer].num_muon:
                        await self._directions.release(layer)
            await self._wake()
