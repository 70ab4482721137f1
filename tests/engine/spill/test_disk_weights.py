"""DiskWeights reads working copies from the shards' files in the order of the uploads.

They come whole, and not before the files have what updates made of them.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain_ray.engine.device.cpu_device import CpuEvent
from megatrain_ray.engine.host.shared_host import Momenta, SharedHost
from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.plan.plan_shards import read_bytes, shard_layout, spill_layout
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.plan.spill_layout import WORKING
from megatrain_ray.engine.spill.disk_weights import DiskWeights, ShardFile
from megatrain_ray.engine.spill.spill_ring import SpillRing
from megatrain_ray.engine.spill.spill_table import SpillTable
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.storage.blob_store import aligned_block
from megatrain_ray.io.storage.measured_store import DiskMeter, MeasuredStore
from tests.engine.spill.test_spill_ring import BLOB, WAIT_S, Watched
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, folder_source, plan_for
from tests.support.tiny import build_tiny

ON_DISK = (2, 3)


class Rig:
    """Holds two shards of a tiny model, of which two blocks have their working copies on disk."""

    def __init__(self, folder: Path, num_fragments: int) -> None:
        mode = Mode(
            num_shards=2, num_fragments=num_fragments, spilled=frozenset({1, *ON_DISK}), on_disk=frozenset(ON_DISK)
        )
        factory = folder_source(build_tiny(folder)).factory
        structure, plan = plan_for(factory, Recipe(1, precision="bf16"), mode, (4, 32))
        # Slots for a layer that cannot be written yet; parts of layers that are no whole pages.
        plan = replace(plan, disk=replace(plan.disk, num_state_slots=8, extent_elements=7 << 10))
        self.layout = structure.layout(num_fragments)
        self.rings, self.stores, files, self.meter = [], [], [], DiskMeter()
        self.plan, num_layers = plan, len(plan.layers)
        self.words = SharedUpdateState(
            memoryview(mmap.mmap(-1, 8 * SharedUpdateState.num_words(num_layers, 2))), num_layers, 2
        )
        self.words.reset(0, plan.updated_layers)
        self.written, self._loop = asyncio.Condition(), asyncio.get_running_loop()
        for k in range(2):
            layout = spill_layout(plan, shard_layout(plan, self.layout, k))
            memory = torch.frombuffer(aligned_block(layout.memory_bytes), dtype=torch.uint8)
            self.stores.append(Watched(layout.blob_bytes))
            self.rings.append(SpillRing(layout, memory, self.stores[k], BLOB, WAIT_S, written=self._ring))
            measured = MeasuredStore(self.stores[k], self.meter)
            files.append(ShardFile(layout, SpillTable(layout, memory), measured, BLOB))
        self.disk = DiskWeights(plan, self.layout, files, poison=True)

    def _ring(self) -> None:
        """Ring the bell, and wake whoever waits. It is called on a thread of a ring's."""
        self.words.ring()
        asyncio.run_coroutine_threadsafe(self._tell(), self._loop)

    async def _tell(self) -> None:
        async with self.written:
            self.written.notify_all()

    def write(self, layer: int, generation: int) -> Tensor:
        """Write a generation of the layer's weights to disk as an update does; return the layer's flat."""
        flat = torch.arange(self.layout.layers[layer].size).remainder(97).add(100 * generation).bfloat16()
        for ring in self.rings:
            for number in ring.layout.state_of(layer):
                with ring.overwrite(number):
                    part = flat[slice(*ring.layout.extents[number].span)]
                    ring.bytes_of(number)[WORKING].copy_(part.view(torch.uint8))
        return flat

    def expect(self, *fragments: FragmentId) -> None:
        self.disk.expect(fragments, 1, self._reached)

    async def _reached(self, layer: int, generation: int) -> None:
        async with asyncio.timeout(WAIT_S), self.written:
            await self.written.wait_for(lambda: self.disk.are_written(layer))

    async def take(self, fragment: FragmentId) -> Tensor:
        """Return a copy of the fragment."""
        parts = await self.disk.take(fragment)
        span, at = self.layout.layers[fragment.layer].fragments[fragment.index], 0
        for start, values in parts:
            assert start == span.start + at
            at += values.numel()
        assert at == span.size
        return torch.cat([values for _, values in parts])

    def release(self) -> CpuEvent:
        """Release after an upload that is not over; return the upload's event."""
        uploaded = CpuEvent(0.0, "upload")
        self.disk.release(uploaded)
        return uploaded

    def num_reads(self) -> int:
        return sum(kind == "read" for store in self.stores for kind, _ in store.calls)


@pytest.fixture
async def rig(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path, getattr(request, "param", 1))
    yield rig
    for store in rig.stores:
        store.release("write")
    await rig.disk.close()
    for ring in rig.rings:
        await asyncio.to_thread(ring.close)


@pytest.mark.parametrize("rig", [1, 3], indirect=True)
async def test_what_is_read_is_what_a_plan_counts(rig: Rig) -> None:
    """Whole pages of every shard's part, which these are not a multiple of."""
    for layer in ON_DISK:
        await asyncio.to_thread(rig.write, layer, 1)
    fragments = [FragmentId(i, f) for i in ON_DISK for f in range(len(rig.layout.layers[i].fragments))]
    rig.expect(*fragments)
    for fragment in fragments:
        await rig.take(fragment)
        rig.release().run(lambda: None)
    counted = read_bytes(rig.plan, rig.layout, [FragmentId(0, 0), *fragments])
    assert rig.meter.moved == (counted, 0)
    assert counted > sum(2 * rig.layout.layers[i].size for i in ON_DISK)


@pytest.mark.parametrize("rig", [1, 3], indirect=True)
async def test_fragments_come_in_order_from_all_shards(rig: Rig) -> None:
    flats = {layer: await asyncio.to_thread(rig.write, layer, 1) for layer in ON_DISK}
    fragments = [FragmentId(i, f) for i in ON_DISK for f in range(len(rig.layout.layers[i].fragments))]
    for order in (fragments, fragments[::-1]):
        rig.expect(FragmentId(0, 0), *order)  # of the first layer's nothing is on disk
        for fragment in order:
            span = rig.layout.layers[fragment.layer].fragments[fragment.index]
            assert torch.equal(await rig.take(fragment), flats[fragment.layer][slice(*span)])
            rig.release().run(lambda: None)


async def test_nothing_is_read_before_the_files_have_it(rig: Rig) -> None:
    await asyncio.to_thread(rig.write, 2, 1)
    flat = await asyncio.to_thread(rig.write, 3, 1)
    rig.expect(FragmentId(2, 0), FragmentId(3, 0))
    await rig.take(FragmentId(2, 0))
    await rig.take(FragmentId(3, 0))
    for _ in range(2):
        rig.release().run(lambda: None)
    for store in rig.stores:
        store.held.add("write")
    flat = await asyncio.to_thread(rig.write, 3, 2)
    assert not rig.disk.are_written(3)
    read = rig.num_reads()
    rig.expect(FragmentId(3, 0))
    taking = asyncio.create_task(rig.take(FragmentId(3, 0)))
    rig.stores[0].release("write")
    await asyncio.to_thread(rig.rings[0].wait_written, rig.rings[0].layout.state_of(3)[-1])
    await rig._tell()
    assert not rig.disk.are_written(3)
    assert (rig.num_reads(), taking.done()) == (read, False)
    rig.stores[1].release("write")
    assert torch.equal(await asyncio.wait_for(taking, WAIT_S), flat)


async def test_a_window_is_filled_again_when_its_upload_is_over(rig: Rig) -> None:
    """Two are read ahead of the first one's use, and no third."""
    flats = {layer: await asyncio.to_thread(rig.write, layer, 1) for layer in ON_DISK}
    order = [FragmentId(layer, 0) for layer in (2, 3, 3, 2)]
    rig.expect(*order)
    first = (await rig.disk.take(order[0]))[0].values
    await rig.take(order[1])
    uploaded, read = rig.release(), rig.num_reads()
    taking = asyncio.create_task(rig.take(order[2]))
    await asyncio.sleep(0.05)  # nothing wakes what must go on waiting
    assert (rig.num_reads(), taking.done()) == (read, False)
    assert torch.equal(first, flats[2][: len(first)])
    uploaded.run(lambda: None)
    assert torch.equal(await asyncio.wait_for(taking, WAIT_S), flats[3])
    assert torch.equal(first, flats[3][: len(first)]), "in the same window"


async def test_a_damaged_block_is_told(rig: Rig) -> None:
    await asyncio.to_thread(rig.write, 2, 1)
    for ring in rig.rings:
        for number in ring.layout.state_of(2):
            await asyncio.to_thread(ring.wait_written, number)
    extent = rig.rings[1].layout.extents[rig.rings[1].layout.state_of(2)[0]]
    rig.stores[1].content[extent.start] ^= 1
    rig.expect(FragmentId(2, 0))
    with pytest.raises(MegatrainError, match="are not what was written there"):
        await rig.take(FragmentId(2, 0))


async def test_a_published_generation_is_fetched_once_it_is_on_disk(rig: Rig) -> None:
    """The bell rings when the last shard has written it, and nobody publishes anything more."""
    working = torch.empty(rig.layout.size_among(rig.plan.weights_on_host), dtype=torch.bfloat16)
    slab = torch.empty(rig.plan.gradients.slab_bytes, dtype=torch.uint8)
    host = SharedHost(rig.plan, rig.layout, working, slab, rig.words, Momenta([], []), rig.disk)
    for store in rig.stores:
        store.held.add("write")
    flat = await asyncio.to_thread(rig.write, 3, 1)
    host.expect([FragmentId(3, 0)], 1)
    for shard in range(2):
        rig.words.generations.finish(shard, 3, 1)
    fetching = asyncio.create_task(host.fetch(FragmentId(3, 0), 1))
    try:
        await asyncio.sleep(0.05)  # nothing wakes what must go on waiting
        assert (rig.num_reads(), fetching.done()) == (0, False)
        for store in rig.stores:
            store.release("write")
        parts = (await asyncio.wait_for(fetching, WAIT_S)).parts
        assert torch.equal(torch.cat([values for _, values in parts]), flat)
    finally:
        await host.close()
