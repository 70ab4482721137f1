"""Blocks that take fewer bytes of a blob than they have: what comes back, what is stored, what damage does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.storage.blob_store import ALIGN_BYTES, aligned, aligned_block
from megatrain_ray.io.storage.packed_store import LENGTH_BYTES, Packable, PackedStore, Packer
from megatrain_ray.io.words.atomic_words import WORD_BYTES, Words
from tests.support.memory_store import MemoryStore

NUM_BYTES = 64 << 10  # of a block
BLOB = "blob"


def alike(dtype: torch.dtype, seed: int = 0, num_bytes: int = NUM_BYTES) -> Tensor:
    """Numbers as moments and gradients are: of some magnitudes, their last bits like chance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_bytes // dtype.itemsize, generator=generator).to(dtype)


def chance(seed: int = 0) -> Tensor:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(NUM_BYTES)), dtype=torch.float32)


def block_of(values: Tensor) -> memoryview:
    data = values.view(torch.uint8).numpy().tobytes()
    block = aligned_block(len(data))[: aligned(len(data))]
    block[: len(data)] = data
    return block


class Blobs:
    """Holds a blob of `itemsizes` blocks and the words beside it: what outlives a process."""

    def __init__(self, itemsizes: Sequence[int]) -> None:
        self.memory = MemoryStore()
        self.memory._blobs[BLOB] = bytearray(len(itemsizes) * NUM_BYTES)
        self._words = memoryview(bytearray(len(itemsizes) * WORD_BYTES))
        self._blocks = {k * NUM_BYTES: Packable(k, size) for k, size in enumerate(itemsizes) if size}

    def store(self) -> PackedStore:
        return PackedStore(self.memory, Words(self._words, len(self._words) // WORD_BYTES), self._blocks, NUM_BYTES)

    @property
    def content(self) -> bytearray:
        return self.memory._blobs[BLOB]


async def written(blobs: Blobs, blocks: Sequence[memoryview]) -> None:
    async with blobs.store().update(BLOB) as blob:
        await asyncio.gather(*(blob.write_at(k * NUM_BYTES, block) for k, block in enumerate(blocks)))


async def found(blobs: Blobs, sizes: Sequence[int]) -> list[bytes]:
    blocks = [aligned_block(size)[:size] for size in sizes]
    async with blobs.store().update(BLOB) as blob:
        await asyncio.gather(*(blob.read_into(k * NUM_BYTES, block) for k, block in enumerate(blocks)))
    return [bytes(block) for block in blocks]


@pytest.mark.parametrize("num_bytes", [ALIGN_BYTES, 3 * ALIGN_BYTES, NUM_BYTES])
async def test_what_was_written_is_read_by_another_process(num_bytes: int) -> None:
    """Whatever a number's bits: not-a-numbers, infinities, zeros, chance; those that are not packed among them."""
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]).repeat(num_bytes // 16)
    values = [alike(torch.float32, 1, num_bytes), alike(torch.bfloat16, 2, num_bytes), odd, torch.zeros_like(odd)]
    blocks = [block_of(value) for value in (*values, chance()[: num_bytes // 4], values[0])]
    blobs = Blobs([4, 2, 4, 4, 4, 0])
    for _ in range(2):  # the second time over what is there
        await written(blobs, blocks)
        assert await found(blobs, [num_bytes] * 6) == [bytes(block) for block in blocks]
        blocks = blocks[::-1][1:] + blocks[-1:]


async def test_a_block_takes_less_and_stays_where_it_is() -> None:
    """What chance made is stored as it is."""
    blobs = Blobs([4, 2, 4, 0])
    values = [alike(torch.float32), alike(torch.bfloat16), chance(), alike(torch.float32)]
    blobs.content[:] = b"\xee" * len(blobs.content)
    await written(blobs, [block_of(value) for value in values])
    parts = [bytes(blobs.content[k * NUM_BYTES : (k + 1) * NUM_BYTES]) for k in range(4)]
    untouched = [len(part) - len(part.rstrip(b"\xee")) for part in parts]
    assert NUM_BYTES // 16 < untouched[0] < NUM_BYTES // 4
    assert NUM_BYTES // 8 < untouched[1] < NUM_BYTES // 2
    as_they_are = [part == bytes(block_of(value)) for part, value in zip(parts, values, strict=True)]
    assert as_they_are == [False, False, True, True]
    assert not any(size % ALIGN_BYTES for size in untouched)


async def test_a_block_that_was_never_written_is_read_as_it_is() -> None:
    blobs = Blobs([4])
    blobs.content[:] = bytes(block_of(chance()))
    assert await found(blobs, [NUM_BYTES]) == [bytes(blobs.content)]


async def test_any_damage_is_an_error_or_other_numbers_of_the_same_size() -> None:
    """The latter is what checksums are for."""
    blobs = Blobs([4])
    block = block_of(alike(torch.float32))
    generator = random.Random(0)
    errors = 0
    for _ in range(200):
        await written(blobs, [block])
        at = generator.choice([generator.randrange(LENGTH_BYTES), generator.randrange(NUM_BYTES // 2)])
        blobs.content[at] ^= 1 << generator.randrange(8)
        try:
            assert await found(blobs, [NUM_BYTES]) != [bytes(block)]
        except MegatrainError as error:
            assert f"bytes 0 to {await stored_bytes(block)} are not what was written there (" in str(error)
            assert "go on from the last save" in str(error)
            errors += 1
    assert 0 < errors < 200


async def stored_bytes(block: memoryview) -> int:
    return len(Packer(NUM_BYTES).pack(block, 4))


async def test_several_at_once_have_memory_of_their_own() -> None:
    blobs = Blobs([4] * 16)
    blocks = [block_of(alike(torch.float32, k)) for k in range(16)]
    await written(blobs, blocks)
    assert await found(blobs, [NUM_BYTES] * 16) == [bytes(block) for block in blocks]


async def test_memory_that_a_thread_may_still_use_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that was cancelled goes on packing in its thread."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    loop, used = asyncio.get_running_loop(), list[Packer]()
    real_pack = Packer.pack

    def pack(self: Packer, block: memoryview, itemsize: int) -> memoryview:
        used.append(self)
        if len(used) == 1:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)
        return real_pack(self, block, itemsize)

    monkeypatch.setattr(Packer, "pack", pack)
    blobs = Blobs([4, 4])
    async with blobs.store().update(BLOB) as blob:
        first = asyncio.create_task(blob.write_at(0, block_of(alike(torch.float32))))
        await begun.wait()
        first.cancel()
        await asyncio.wait([first])
        await blob.write_at(NUM_BYTES, block_of(alike(torch.float32, 1)))
        go_on.set()
    assert used[0] is not used[1]


def test_a_packer_takes_what_it_says() -> None:
    packer = Packer(NUM_BYTES)
    buffers = [np.frombuffer(packer._packed, np.uint8), packer._firsts]
    assert sum(buffer.nbytes for buffer in buffers) == Packer.num_bytes(NUM_BYTES)
    with pytest.raises(ValueError, match="of a block of at most"):
        packer.room(NUM_BYTES + ALIGN_BYTES)
