"""LayerStreamer alone: idempotent prefetch and wait, loads that wait for slot and generation, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import CancelledError

import pytest
import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.device import Event
from megatrain_ray.engine.host.interfaces import HostWeights
from megatrain_ray.engine.layout.flat_layout import FlatLayout, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout, WeightPart
from megatrain_ray.engine.plan.plan_groups import SlotSpec
from megatrain_ray.engine.plan.residency import FragmentId, plan_residency
from megatrain_ray.engine.weights_stream.bound_weights import SlotRing, SlotState, SlotStateError
from megatrain_ray.engine.weights_stream.layer_streamer import Gathers, LayerStreamer
from megatrain_ray.errors import DeadlineError, MegatrainError

SIZE, LAYERS = 2048, 4


class Source:
    """Layer i of generation g is full of 10 g + i; a generation that is not there yet is waited for."""

    def __init__(self) -> None:
        self.generation = 0
        self.fetched: list[int] = []
        self.changed = asyncio.Condition()
        self.turns = 0  # of the event loop that each fetch takes
        self.error: Exception | None = None

    def expect(self, fragments: Sequence[FragmentId], generation: int) -> None:
        self.released: list[FragmentId] = []

    def release(self, fragment: FragmentId, uploaded: Event) -> None:
        self.released.append(fragment)

    async def fetch(self, fragment: FragmentId, generation: int) -> HostWeights:
        async with self.changed:
            await self.changed.wait_for(lambda: self.generation >= generation or self.error)
        for _ in range(self.turns):
            await asyncio.sleep(0)
        if self.error:
            raise self.error
        self.fetched.append(fragment.layer)
        flat = torch.full((SIZE,), 10.0 * generation + fragment.layer)
        cut = SIZE // 3  # from two places
        return HostWeights([WeightPart(0, flat[:cut]), WeightPart(cut, flat[cut:])], 0.0)

    async def reach(self, generation: int) -> None:
        async with self.changed:
            self.generation = generation
            self.changed.notify_all()


class Rig:
    def __init__(self, num_slots: int = 2, deadline_s: float = 10.0, gathers: Gathers | None = None) -> None:
        layout = ModelLayout(
            tuple(FlatLayout.build(f"l{i}", [ParameterSpec(f"l{i}", "w", (SIZE,))]) for i in range(LAYERS)), ()
        )
        order = [0, 1, 2, 3, 2, 1, 0]
        fragments = {FragmentId(i, 0): SIZE * 4 for i in range(LAYERS)}
        slots = [SlotSpec("block", SIZE * 4)] * num_slots
        residency = plan_residency(
            [(FragmentId(i, 0),) for i in order], fragments, dict.fromkeys(fragments, "block"), slots
        )
        self.order, self.residency = order, residency
        self.device = CpuDevice()
        self.ring = SlotRing(self.device.allocate(num_slots * SIZE * 4), [SIZE * 4] * num_slots, poison=True)
        self.source = Source()
        self.streamer = LayerStreamer(self.device, self.ring, layout, self.source, deadline_s, gathers)

    def read(self, visit: int) -> float:
        """Return what a kernel of this visit would see."""
        with self.streamer.layer(visit) as regions:
            (region,) = regions.values()
            return float(region.view(torch.float32)[0])


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.streamer.cancel()
    rig.device.close()


async def test_a_step_sees_every_layer(rig: Rig) -> None:
    rig.streamer.begin(rig.residency, 0)
    seen = await asyncio.to_thread(lambda: [rig.read(v) for v in range(len(rig.order))])
    await rig.streamer.finish()
    assert seen == [0, 1, 2, 3, 2, 1, 0]
    assert rig.source.fetched == [0, 1, 2, 3, 1, 0]
    assert sum(r.op.name == "load" for r in rig.device.timeline.records) == 2 * LAYERS - 2
    assert [rig.ring[i].state for i in range(2)] == [SlotState.FREE] * 2


async def test_wait_any_number_of_times(rig: Rig) -> None:
    rig.streamer.begin(rig.residency, 0)
    first = await asyncio.to_thread(rig.streamer.wait, 0)
    again = await asyncio.to_thread(rig.streamer.wait, 0)
    assert first.keys() == again.keys() == {FragmentId(0, 0)}
    assert rig.source.fetched.count(0) == 1


async def test_no_more_is_loaded_than_there_are_slots(rig: Rig) -> None:
    rig.streamer.begin(rig.residency, 0)
    await asyncio.to_thread(rig.streamer.wait, 1)
    assert rig.source.fetched == [0, 1]
    assert not rig.streamer._arrivals[2][0].done()
    await asyncio.to_thread(rig.read, 0)
    await asyncio.to_thread(rig.streamer.wait, 2)
    assert rig.source.fetched == [0, 1, 2]


async def test_a_load_waits_for_its_generation(rig: Rig) -> None:
    rig.streamer.begin(rig.residency, 1)
    reading = asyncio.create_task(asyncio.to_thread(rig.read, 0))
    await asyncio.sleep(0)
    assert rig.source.fetched == []
    await rig.source.reach(1)
    assert await reading == 10.0


async def test_the_next_step_loads_everything_again(rig: Rig) -> None:
    for generation in range(2):
        await rig.source.reach(generation)
        rig.streamer.begin(rig.residency, generation)
        seen = await asyncio.to_thread(lambda: [rig.read(v) for v in range(len(rig.order))])
        await rig.streamer.finish()
        assert seen == [10.0 * generation + layer for layer in rig.order]


async def test_a_failure_of_the_source_reaches_the_compute_thread(rig: Rig) -> None:
    rig.source.error = MegatrainError("a shard failed")
    rig.streamer.begin(rig.residency, 0)
    with pytest.raises(MegatrainError, match="a shard failed"):
        await asyncio.to_thread(rig.streamer.wait, 0)
    with pytest.raises(MegatrainError, match="a shard failed"):
        await rig.streamer.finish()


async def test_cancelling_lets_a_waiting_thread_go(rig: Rig) -> None:
    rig.streamer.begin(rig.residency, 1)
    waiting = asyncio.create_task(asyncio.to_thread(rig.streamer.wait, 0))
    await asyncio.sleep(0)
    await rig.streamer.cancel()
    with pytest.raises((CancelledError, asyncio.CancelledError)):
        await waiting


async def test_a_stuck_load_is_named() -> None:
    rig = Rig(deadline_s=0.01)
    rig.streamer.begin(rig.residency, 1)
    with pytest.raises(DeadlineError, match="no load for visit 0"):
        await asyncio.to_thread(rig.streamer.wait, 0)
    await rig.streamer.cancel()
    rig.device.close()


async def test_a_visit_cannot_be_entered_twice_at_once(rig: Rig) -> None:
    rig.streamer.begin(rig.residency, 0)

    def enter() -> None:
        with rig.streamer.layer(0), pytest.raises(SlotStateError, match="IN_USE"), rig.streamer.layer(0):
            pass

    await asyncio.to_thread(enter)


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("turns", [0, 200], ids=["uploads are ahead", "uploads are late"])
async def test_all_gathers_have_one_place_among_sums(num_slots: int, turns: int) -> None:
    """The order is that of every other device, whichever of the two is faster there."""
    log: list[str] = []

    def gather(layer: int, flat: torch.Tensor, loaded: Event) -> Event:
        log.append(f"gather {layer}")
        return loaded

    rig = Rig(num_slots, gathers=gather)
    rig.source.turns = turns

    def compute() -> None:
        for visit, layer in enumerate(rig.order):
            with rig.streamer.layer(visit):
                if visit >= LAYERS - 1:
                    rig.streamer.sync_collective_order(visit)
                    log.append(f"sum {layer}")

    try:
        rig.streamer.begin(rig.residency, 0)
        await asyncio.to_thread(compute)
        await rig.streamer.finish()
    finally:
        rig.device.close()
    assert (
        log
        == {
            2: [
                "gather 0",
                "gather 1",
                "gather 2",
                "gather 3",
                "sum 3",
                "gather 1",
                "sum 2",
                "gather 0",
                "sum 1",
                "sum 0",
            ],
            3: ["gather 0", "gather 1", "gather 2", "gather 3", "sum 3", "gather 0", "sum 2", "sum 1", "sum 0"],
        }[num_slots]
    )
