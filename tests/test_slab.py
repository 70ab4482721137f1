from __future__ import annotations

import asyncio

import pytest
import torch

from megatrain_ray.engine.layout import FlatLayout, ModelLayout, ParameterSpec
from megatrain_ray.engine.slab import SlabPool
from megatrain_ray.errors import CapacityError


def layout(*sizes: int) -> ModelLayout:
    flats = [FlatLayout.build(f"l{i}", [ParameterSpec(f"l{i}", "w", (n,))]) for i, n in enumerate(sizes)]
    return ModelLayout(tuple(flats), ())


async def test_a_whole_model_slab_gives_every_layer_its_own_place() -> None:
    model = layout(2048, 4096, 2048)
    pool = SlabPool(torch.zeros(model.size * 4, dtype=torch.uint8), model, 4)
    leases = [await pool.lease(i) for i in (2, 0, 1)]
    assert [lease.start_bytes for lease in leases] == [6144 * 4, 0, 2048 * 4]
    assert [lease.region.nbytes for lease in leases] == [8192, 8192, 16384]


async def test_a_small_slab_is_shared_in_turn() -> None:
    model = layout(2048, 4096, 2048, 2048)
    pool = SlabPool(torch.zeros(2 * 4096 * 2, dtype=torch.uint8), model, 2)
    first, second = await pool.lease(2), await pool.lease(1)
    assert {first.start_bytes, second.start_bytes} == {0, 4096 * 2}
    waiting = asyncio.create_task(pool.lease(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await pool.release(2)
    assert (await waiting).start_bytes == first.start_bytes


async def test_a_layer_has_one_lease_at_a_time() -> None:
    model = layout(2048)
    pool = SlabPool(torch.zeros(4096, dtype=torch.uint8), model, 2)
    await pool.lease(0)
    again = asyncio.create_task(pool.lease(0))
    await asyncio.sleep(0)
    assert not again.done()
    await pool.release(0)
    await again


def test_a_slab_smaller_than_a_layer_is_refused() -> None:
    with pytest.raises(CapacityError, match="has 4096 bytes, the largest layer needs 8192"):
        SlabPool(torch.zeros(4096, dtype=torch.uint8), layout(4096), 2)
