"""Transfers extents between a blob on disk and memory, several blocks at the same time.

The transfers are asyncio tasks on an event loop in a thread of its own. Every block has a checksum in shared memory,
which is stored before the block is written. A block that is read back with other contents fails the run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.plan.spill_layout import Extent
from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.storage.blob_store import Blob, BlobStore, aligned_block
from megatrain_ray.io.words.atomic_words import Words

Found = TypeVar("Found")

TRANSFERS = 8  # blocks that are transferred at the same time, over all slots
CLOSE_S = 1.0  # that `close` waits for blocks that the disk is working on: a few MiB each


def checksum_of(block: memoryview) -> int:
    """Return the sum of the block's 64-bit words. It begins and ends at multiples of 8 bytes.

    It runs at 50 GB/s on one core of a small machine while the block is in its caches. It changes when a disk returns
    another block, an older version of the block, zeros, or flipped bits.
    """
    assert isinstance(block, memoryview)
    return int(np.frombuffer(block, np.int64).sum())


class Checksums(NamedTuple):
    """Keeps one word with a checksum for each block of a blob."""

    words: Words
    first: int  # the word of block 0

    def of(self, extent: Extent, index: int) -> int:
        return self.words.load(self.first + extent.first_block + index)

    def store(self, extent: Extent, index: int, checksum: int) -> None:
        self.words.store(self.first + extent.first_block + index, checksum)

    async def read_block(self, blob: Blob, where: str, extent: Extent, index: int, memory: memoryview) -> None:
        """Read block `index` of the extent into `memory` and compare its checksum.

        where: says where the blob is, for messages.

        Raises MegatrainError if the block cannot be read or is not what was written.
        """
        block = extent.blocks[index]
        await blob.read_into(extent.start + block.start, memory)
        found, expected = await asyncio.to_thread(checksum_of, memory), self.of(extent, index)
        if found != expected:
            raise MegatrainError(
                f"{where}: bytes {extent.start + block.start} to {extent.start + block.stop} are not what was written "
                f"there (checksum {found & 2**64 - 1:#x}, expected {expected & 2**64 - 1:#x}): the disk or its memory "
                "is damaged; go on from the last save on another spill.path"
            )


class _ReadBlock(NamedTuple):
    number: int
    checksum: int
    content: memoryview


class SpillTransfers:
    """Runs the transfers of one blob.

    Any thread may call `submit`, `block`, `fail` and `close`. The coroutines are only for work that was submitted.
    """

    def __init__(
        self, store: BlobStore, name: str, checksums: Checksums, timeout_s: float, failed: Callable[[], None]
    ) -> None:
        """Prepare the transfers; `open` starts them.

        name: name of a blob in `store`.
        timeout_s: limit of every wait in `block` and `wait_for`.
        failed: called when something went wrong, which is then in `error`.
        """
        self._store = store
        self._name = name
        self._checksums = checksums
        self.timeout_s = timeout_s
        self._failed = failed
        self.error: Exception | None = None  # the first error
        self._submitting = threading.Lock()
        self._last = _ReadBlock(-1, 0, memoryview(b""))  # the one that `block` read last
        self._blob: Blob
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=f"spill {name}", daemon=True)

    def open(self) -> None:
        """Start the event loop's thread and open the blob. Raises MegatrainError if there is no such blob."""
        self._thread.start()
        self._started.wait()
        if self.error is not None:
            self._thread.join(CLOSE_S)
            raise self.error

    def submit(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that reads and writes on the event loop. An exception that it raises becomes `error`."""
        self._loop.call_soon_threadsafe(self._begin, work)

    async def read(self, extent: Extent, memory: memoryview) -> None:
        """Read a whole extent. Raises MegatrainError if it cannot be read or is not what was written."""
        blocks = enumerate(extent.blocks)
        await asyncio.gather(*(self._read_block(extent, i, memory[slice(*block)]) for i, block in blocks))

    async def write(self, extent: Extent, memory: memoryview) -> None:
        """Write a whole extent. Raises MegatrainError if it cannot be written."""
        blocks = enumerate(extent.blocks)
        await asyncio.gather(*(self._write_block(extent, i, block, memory[slice(*block)]) for i, block in blocks))

    def block(self, extent: Extent, index: int) -> memoryview:
        """Return a block as the blob has it.

        The block read last is kept, because consecutive parts of a save often need the same one. Raises what `read`
        raises, and DeadlineError.
        """
        number, checksum = extent.first_block + index, self._checksums.of(extent, index)
        last = self._last  # read once: the thread of an abandoned save may replace it at any time
        if (last.number, last.checksum) != (number, checksum):
            memory = aligned_block(extent.blocks[index].size)
            self._finish(self._read_block(extent, index, memory), f"block {number} to be read")
            last = self._last = _ReadBlock(number, checksum, memory)
        return last.content

    def wait_for(self, changed: threading.Condition, condition: Callable[[], Found | None], what: str) -> Found:
        """Wait until `condition` returns something that is neither None nor False, and return that.

        changed: `failed` notifies it. The caller holds its lock.
        what: what is waited for, for the message.

        Raises `error` if a transfer failed, and DeadlineError.
        """
        deadline_s = time.monotonic() + self.timeout_s
        while not (found := condition()):
            if self.error is not None:
                raise self.error
            if time.monotonic() > deadline_s:
                raise self._late(what)
            changed.wait(deadline_s - time.monotonic())
        return found

    def _late(self, what: str) -> DeadlineError:
        where = self._store.describe(self._name)
        return DeadlineError(f"waited {self.timeout_s:.0f} s for {what}: {where} does not get on")

    def fail(self, error: Exception) -> None:
        """Record an error and make every waiting thread raise it. Only the first error is kept."""
        with self._submitting:
            self.error = self.error or error
        self._failed()

    def close(self) -> None:
        """Cancel all transfers, and make every waiting thread raise. Idempotent.

        It waits for blocks that the disk is working on, but only for CLOSE_S.
        """
        self.fail(MegatrainError(f"{self._store.describe(self._name)} is not used any more"))
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_S)

    def _finish(self, work: Coroutine[Any, Any, None], what: str) -> None:
        with self._submitting:
            if self.error is not None:
                work.close()
                raise self.error
            done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            done.result(self.timeout_s)
        except TimeoutError:
            raise self._late(what) from None
        except CancelledError:
            assert self.error is not None  # `fail` sets it before tasks are cancelled
            raise self.error from None

    # The methods below run on the event loop's thread.

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(TRANSFERS))  # asyncio's own has fewer threads on few cores
        self._closing, self._room = asyncio.Event(), asyncio.Semaphore(TRANSFERS)
        try:
            async with self._store.update(self._name) as self._blob:
                self._started.set()
                await self._closing.wait()
                await _give_up(asyncio.all_tasks() - {asyncio.current_task()})  # while the blob is open
        except Exception as error:
            self.fail(error)
        finally:
            self._started.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.fail(error)

    async def _read_block(self, extent: Extent, index: int, memory: memoryview) -> None:
        async with self._room:
            where = self._store.describe(self._name)
            await self._checksums.read_block(self._blob, where, extent, index, memory)

    async def _write_block(self, extent: Extent, index: int, block: ElementRange, memory: memoryview) -> None:
        async with self._room:
            self._checksums.store(extent, index, await asyncio.to_thread(checksum_of, memory))
            await self._blob.write_at(extent.start + block.start, memory)


async def _give_up(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and return when none of them runs any more. Transfers that had begun have ended by then."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
