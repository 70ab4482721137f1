"""Gradients that wait on disk: when their place in the slab is free, and what a death leaves."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain_ray.engine.host.shared_host import Momenta, SharedHost
from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.optimizer.undo_log import serial_of
from megatrain_ray.engine.plan.spill_layout import GRADIENT
from megatrain_ray.engine.shards.adam_shard import AdamShard
from megatrain_ray.engine.shards.shard_loop import ShardLoop
from megatrain_ray.engine.shards.spilling_shard import SpillingShard
from megatrain_ray.errors import MegatrainError
from tests.engine.shards.test_shard_loop import FORWARD, WAIT_S, Worker, gate_of, wait_generation
from tests.engine.spill.test_spill_ring import Memory, content, memory_of, opened
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, folder_source, plan_for, train_engine
from tests.support.shards import (
    Dictionary,
    flat_directions,
    flat_gradients,
    headers,
    model_layout,
    new_words,
    open_shards,
    poisoned,
    random_masters,
)
from tests.support.tiny import build_tiny, tiny_batches

STORED = (2, 0)  # layer 1 is partly Muon's
UPDATES = 3


def two_memories() -> list[Memory]:
    """Return the memories of two shards."""
    working, stored = poisoned(model_layout().size, torch.bfloat16), frozenset(STORED)
    return [memory_of(k, 2, FORWARD, 3, working, stored=stored, offload_dtype=torch.bfloat16) for k in range(2)]


def loop_of(shard: AdamShard, words: SharedUpdateState, slab: Tensor) -> ShardLoop:
    gate = gate_of(shard, words, FORWARD)
    return ShardLoop(shard, words, slab, torch.bfloat16, FORWARD, gate, stored=STORED)


def wait_stored(words: SharedUpdateState, layer: int, update: int) -> None:
    seen = words.generation_bell()
    while words.gradients.stored(layer) < update:
        words.check()
        seen = words.wait_generation_bell(seen, WAIT_S)


def take_away(slab: Tensor, layer: int) -> None:
    """Overwrite the layer's place in the slab, as another layer's gradient does."""
    start, size = model_layout().starts[layer], model_layout().layers[layer].trained.size
    slab[2 * start : 2 * (start + size)] = 0xFF


def new_slab() -> Tensor:
    return torch.zeros(4 * model_layout().size, dtype=torch.uint8)


def expected(num_updates: int) -> dict[tuple[str, str, int], bytes]:
    with open_shards(Precision.BF16, 2) as shards:
        shards.load(Dictionary(random_masters(model_layout())))
        for number in range(1, num_updates + 1):
            gradients = flat_gradients(model_layout(), number, torch.bfloat16)
            for layer in FORWARD:
                directions, serial = flat_directions(model_layout(), number)[layer], serial_of(number, layer, 3)
                for shard in shards.shards:
                    shard.update(layer, gradients[layer], headers(number)[-1], serial, directions)
        return content(shards.shards)


def end(words: SharedUpdateState, loops: Sequence[ShardLoop], num_updates: int) -> None:
    for layer in FORWARD:
        wait_generation(words, layer, num_updates)
    words.stop()
    for loop in loops:
        loop.join(WAIT_S)


def test_a_gradients_place_is_free_before_the_update() -> None:
    """It is free as soon as the shards have the gradient, long before the header is there."""
    words, slab = new_words(), new_slab()
    worker = Worker(model_layout(), words, slab)
    with opened(two_memories()) as shards:
        for shard in shards:
            shard.load(Dictionary(random_masters(model_layout())))
        loops = [loop_of(shard, words, slab) for shard in shards]
        for loop in loops:
            loop.start()
        for number in range(1, UPDATES + 1):
            gradients = flat_gradients(model_layout(), number, torch.bfloat16)
            for layer in FORWARD:
                wait_generation(words, layer, number - 1)
            for layer in reversed(FORWARD):
                worker.land(number, layer, gradients[layer])
                if layer in STORED:
                    wait_stored(words, layer, number)
                    take_away(slab, layer)
            words.updates.commit(headers(number)[-1])
        end(words, loops, UPDATES)
        assert content(shards) == expected(UPDATES)


@pytest.mark.parametrize("num_extents", [0, 1])
def test_a_shard_that_died_while_it_took_a_gradient_takes_it_again(num_extents: int) -> None:
    """The shard died after it had taken the gradient of layer 2, which the slab has no more.

    Of layer 0, a part had come into a slot, but not all of it.
    """
    memories, words, slab = two_memories(), new_words(), new_slab()
    worker, gradients = Worker(model_layout(), words, slab), flat_gradients(model_layout(), 1, torch.bfloat16)
    with opened(memories[:1]) as (other,):
        first = memories[1].shard()
        for shard in (first, other):
            shard.load(Dictionary(random_masters(model_layout())))
        loop = loop_of(other, words, slab)
        loop.start()
        for layer in (2, 1, 0):
            worker.land(1, layer, gradients[layer])
        first.store(2, gradients[2])
        words.gradients.store(1, 2, 1)
        wait_stored(words, 2, 1)
        take_away(slab, 2)
        numbers = memories[1].layout.gradients_of(0)[:num_extents]
        assert len(numbers) == num_extents
        for number in numbers:
            first._ring.overwrite(number).__enter__()
            first._ring.bytes_of(number)[GRADIENT].fill_(7)
            if number != numbers[-1]:
                first._ring.release(number)
        words.updates.commit(headers(1)[-1])
        first.close()  # a process that died moves nothing any more
        with opened(memories[1:]) as (second,):
            again = loop_of(second, words, slab)
            again.start()
            end(words, [loop, again], 1)
            assert content([other, second]) == expected(1)


def test_a_shard_without_a_disk_takes_none() -> None:
    with open_shards(Precision.BF16, 1) as shards, pytest.raises(MegatrainError, match="has no disk for the gradient"):
        shards.shards[0].store(0, flat_gradients(model_layout(), 1, torch.bfloat16)[0])


@pytest.mark.parametrize("signal", ["stored", "updated"])
async def test_a_lease_ends_when_every_shard_has_the_gradient(tmp_path: Path, signal: str) -> None:
    """This holds for a layer whose gradients wait on disk; else the lease ends when every shard has its update."""
    folder, mode = build_tiny(tmp_path), Mode(num_shards=2, stored=frozenset({1, 2}))
    structure, plan = plan_for(folder_source(folder).factory, Recipe(1), mode, (4, 32))
    layout, num_layers = structure.layout(), len(plan.layers)
    words = SharedUpdateState(memoryview(mmap.mmap(-1, 8 * SharedUpdateState.num_words(num_layers, 2))), num_layers, 2)
    words.reset(0, plan.updated_layers)
    publish = words.gradients.store if signal == "stored" else words.generations.finish
    slab = torch.empty(plan.gradients.slab_bytes, dtype=torch.uint8)
    host = SharedHost(plan, layout, torch.empty(layout.size), slab, words, Momenta([], []))
    try:
        layer = 2 if signal == "stored" else 3
        await host.land(await host.lease(layer, 1), 1, 0.0)
        again = asyncio.create_task(host.lease(layer, 1))
        publish(0, layer, 1)
        await asyncio.sleep(0.05)  # nothing wakes what must go on waiting
        assert not again.done()
        publish(1, layer, 1)
        await asyncio.wait_for(again, WAIT_S)
    finally:
        await host.close()


def test_a_store_is_not_a_generation() -> None:
    words = new_words(num_shards=2)
    seen = words.generation_bell()
    words.gradients.store(0, 1, 1)
    assert words.generation_bell() > seen
    assert (words.gradients.stored_by(0, 1), words.gradients.stored_by(1, 1), words.gradients.stored(1)) == (1, 0, 0)
    assert words.generations.of_layer(1) == 0
    words.gradients.store(1, 1, 1)
    assert words.gradients.stored(1) == 1
    assert words.generations.torn(0) is None


def test_an_error_of_a_shard_ends_a_step_that_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, the compute thread waits for gradients to leave, which nobody takes any more."""

    def fail(*_: object) -> None:
        raise MegatrainError("the disk is gone")

    monkeypatch.setattr(SpillingShard, "store", fail)
    mode = Mode(stored=frozenset({1, 2, 3, 4}))
    with pytest.raises(MegatrainError, match="the disk is gone"):
        train_engine(build_tiny(tmp_path), tiny_batches(1), Recipe(1, micro_batch_size=4), mode)
