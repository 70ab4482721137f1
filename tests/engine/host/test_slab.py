from __future__ import annotations

import asyncio

import pytest
import torch

from megatrain_ray.engine.host.gradient_slab import GradientSlab
from megatrain_ray.errors import CapacityError


async def test_a_whole_model_slab_gives_every_layer_its_own_place() -> None:
    pool = GradientSlab(torch.zeros(32768, dtype=torch.uint8), [8192, 16384, 8192], start=512)
    leases = [await pool.lease(i) for i in (2, 0, 1)]
    assert [lease.start_bytes for lease in leases] == [512 + 24576, 512, 512 + 8192]
    assert [lease.region.nbytes for lease in leases] == [8192, 8192, 16384]


async def test_a_small_slab_is_shared_in_turn() -> None:
    """The first gap that is large enough: of two that together would be, neither is."""
    pool = GradientSlab(torch.zeros(16384, dtype=torch.uint8), [4096, 8192, 4096, 8192])
    starts = [(await pool.lease(i)).start_bytes for i in (0, 1, 2)]
    assert starts == [0, 4096, 12288]
    waiting = asyncio.create_task(pool.lease(3))
    for released in (0, 2):
        await pool.release(released)
        await asyncio.sleep(0)
        assert not waiting.done()
    assert (await pool.lease(0)).start_bytes == 0
    await pool.release(1)
    assert (await waiting).start_bytes == 4096


async def test_what_passes_takes_turns_behind_what_stays() -> None:
    """Whatever leaves or comes, and in which order: those that stay always have room."""
    sizes, passing = [4096, 8192, 4096, 8192, 8192], frozenset({1, 3, 4})
    pool = GradientSlab(torch.zeros(8192 + 12288, dtype=torch.uint8), sizes, start=512, passing=passing)
    assert (await pool.lease(4)).start_bytes == 512 + 8192
    assert [(await pool.lease(i)).start_bytes for i in (2, 0)] == [512 + 4096, 512]
    waiting = asyncio.create_task(pool.lease(3))
    for released in (2, 0):
        await pool.release(released)
        await asyncio.sleep(0)
        assert not waiting.done()
    await pool.release(4)
    assert (await waiting).start_bytes == 512 + 8192


def test_what_stays_must_fit_beside_the_largest_that_passes() -> None:
    sizes = [4096, 8192, 4096]
    GradientSlab(torch.zeros(16384, dtype=torch.uint8), sizes, passing=frozenset({1, 2}))
    for stays in (frozenset({1, 2}), frozenset({1}), frozenset[int]()):
        with pytest.raises(CapacityError):
            GradientSlab(torch.zeros(sum(sizes) - 4096 - 1, dtype=torch.uint8), sizes, passing=stays)


async def test_an_aliased_slab_gives_every_layer_a_place() -> None:
    """Nobody waits for room, as in a slab that holds all of them."""
    pool = GradientSlab(torch.zeros(16384, dtype=torch.uint8), [4096, 8192, 8192, 4096], start=512, aliased=True)
    leases = [await pool.lease(i) for i in range(4)]
    assert [lease.start_bytes - 512 for lease in leases] == [0, 4096, 0, 8192]
    assert [lease.region.nbytes for lease in leases] == [4096, 8192, 8192, 4096]


async def test_a_layer_has_one_lease_at_a_time() -> None:
    pool = GradientSlab(torch.zeros(4096, dtype=torch.uint8), [4096])
    await pool.lease(0)
    again = asyncio.create_task(pool.lease(0))
    await asyncio.sleep(0)
    assert not again.done()
    await pool.release(0)
    await again


def test_a_slab_smaller_than_a_layer_is_refused() -> None:
    with pytest.raises(CapacityError, match="has 4096 bytes, what stays and the largest layer need 8192"):
        GradientSlab(torch.zeros(4096, dtype=torch.uint8), [8192])
