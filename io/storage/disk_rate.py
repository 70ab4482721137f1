"""Measures how fast a disk reads and writes at the same time, as in a step that streams state from and to it."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.storage.blob_store import BlobStore, aligned_block, run_together
from megatrain_ray.io.storage.disk_io import PLAIN, DiskWay, held_files
from megatrain_ray.io.storage.packed_store import Packable, PackedStore
from megatrain_ray.io.words.atomic_words import WORD_BYTES, Words

BLOCK_BYTES = 8 << 20
IN_FLIGHT = 4  # blocks in each direction at a time: a guess of what keeps a drive busy
FILL_S, MIXED_S = 0.5, 1.5  # no block begins later: while the file is filled, and while it is measured


def measure_mixed(folder: Path, num_bytes: int, way: DiskWay = PLAIN) -> float:
    """Return bytes per second, reads and writes together, of both at the same time.

    Reads `num_bytes` and writes as many in place, bypassing the page cache if the file system can. On a slow disk it
    moves only as much as two seconds allow. If blocks are packed, all their bytes count, however few are stored. The
    file has no name, so nothing of it remains, whatever ends this process. Raises MegatrainError.
    """
    with explained("write", folder), tempfile.TemporaryFile(dir=folder) as file:
        num_blocks = -(-num_bytes // BLOCK_BYTES)
        os.ftruncate(file.fileno(), num_blocks * BLOCK_BYTES)
        store: BlobStore = held_files(way.io)
        if way.packed:
            store = _packing(store, num_blocks)
        return asyncio.run(_mixed_rate(store, str(file.fileno()), num_blocks))


def _packing(store: BlobStore, num_blocks: int) -> BlobStore:
    """Return a store that packs blocks like state, a fifth of which is residuals that are not packed."""
    words = Words(memoryview(bytearray(num_blocks * WORD_BYTES)), num_blocks)
    blocks = {k * BLOCK_BYTES: Packable(k, 4) for k in range(num_blocks) if k % 5}
    return PackedStore(store, words, blocks, BLOCK_BYTES)


def _moments() -> memoryview:
    """Return a block about as compressible as moments: packing makes it 1.17 times smaller."""
    generator = np.random.default_rng(0)
    values, scales = generator.standard_normal((2, BLOCK_BYTES // 4), np.float32)
    return memoryview((values * np.exp(scales)).tobytes())


async def _mixed_rate(store: BlobStore, name: str, num_blocks: int) -> float:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * IN_FLIGHT))
    into = [aligned_block(BLOCK_BYTES) for _ in range(IN_FLIGHT)]
    values = aligned_block(BLOCK_BYTES)
    values[:] = _moments()  # zeros may cost a drive less
    async with store.update(name) as blob:

        async def write(number: int, block: memoryview) -> None:
            await blob.write_at(number * BLOCK_BYTES, block)

        async def rewrite(number: int, block: memoryview) -> None:
            await write((number + num_filled // 2) % num_filled, block)

        async def read(number: int, block: memoryview) -> None:
            await blob.read_into(number % num_filled * BLOCK_BYTES, block)

        # Not counted: spilled state is written in place, and allocating disk space costs other time than that.
        num_filled = await _transfer(FILL_S, _Direction(write, [values] * IN_FLIGHT, num_blocks))
        start_s = time.monotonic()
        both = _Direction(read, into, num_blocks), _Direction(rewrite, [values] * IN_FLIGHT, num_blocks)
        num_moved = await _transfer(MIXED_S, *both)
    return num_moved * BLOCK_BYTES / (time.monotonic() - start_s)


@dataclass
class _Direction:
    """Transfers blocks 0, 1, … in one direction, as many at a time as there are buffers; `begun` so far."""

    transfer: Callable[[int, memoryview], Awaitable[None]]
    buffers: Sequence[memoryview]
    num_blocks: int
    begun: int = 0

    async def work(self, buffer: memoryview, end_s: float) -> None:
        """Transfer blocks until all are begun or the time is over, but at least one."""
        while not self.begun or (self.begun < self.num_blocks and time.monotonic() < end_s):
            number, self.begun = self.begun, self.begun + 1
            await self.transfer(number, buffer)


async def _transfer(limit_s: float, *directions: _Direction) -> int:
    """Run transfers in these directions for at most `limit_s`; return the number of blocks moved."""
    end_s = time.monotonic() + limit_s
    await run_together(direction.work(buffer, end_s) for direction in directions for buffer in direction.buffers)
    return sum(direction.begun for direction in directions)
