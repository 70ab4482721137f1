"""Reads working copies that are on disk, ahead of their upload to the device.

The shards' files hold them (plan/spill_layout.py), because an update reads and writes them together with the state. The
order of uploads is known before a step begins. So working copies are read ahead in that order, into a few upload
buffers on the host. A working copy is read once the files have everything that updates made of it. The tables next to
the shards' slots tell that. What is read must match the checksums in these tables.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megatrain_ray.engine.device.device import Event
from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.model_layout import ModelLayout, WeightPart
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.plan.spill_layout import WORKING, Extent, SpillLayout
from megatrain_ray.engine.spill.spill_ring import POISON
from megatrain_ray.engine.spill.spill_table import SpillTable
from megatrain_ray.engine.spill.spill_transfers import TRANSFERS
from megatrain_ray.errors import DeadlineError, first_failure
from megatrain_ray.io.storage.blob_store import Blob, BlobStore, aligned_block
from megatrain_ray.spans import Row, SpanLog

# Waits until the files have a layer (first argument) at a generation (second argument).
Reached = Callable[[int, int], Awaitable[None]]


class ShardFile(NamedTuple):
    """Describes what one shard has on disk."""

    layout: SpillLayout
    table: SpillTable
    store: BlobStore
    name: str  # of the blob in `store`


@dataclass
class _UploadBuffer:
    """Is a host buffer for one fragment at a time."""

    memory: torch.Tensor  # 1-D uint8
    fragment: FragmentId | None = None
    parts: list[WeightPart] = field(default_factory=list)
    # Resolves to the event of the copy to the device, after which the buffer may be filled again.
    emptied: asyncio.Future[Event] | None = None


class DiskWeights:
    """Reads the working copies that a plan keeps on disk. Use it on one event loop.

    Fragments are taken and released in the order in which they were expected.
    """

    def __init__(
        self, plan: Plan, layout: ModelLayout, files: Sequence[ShardFile], *, spans: SpanLog | None = None,
        poison: bool = False,
    ) -> None:  # fmt: skip
        """Allocate the buffers.

        files: files of all shards that own something of these layers.
        spans: records the reads.
        poison: fill released buffers with NaN before they are read into.
        """
        self.layers = plan.weights_on_disk
        self._layout = layout
        self._files = files
        self._dtype = plan.precision.working_dtype
        self._deadline_s = plan.update_deadline_s
        self._spans = spans or SpanLog()
        self._poison = poison
        size, count = max(map(self._largest_bytes, self.layers)), plan.disk.num_upload_buffers
        self.memory = torch.frombuffer(aligned_block(count * size), dtype=torch.uint8)
        self._buffers = deque(_UploadBuffer(self.memory[i * size :][:size]) for i in range(count))
        self._filled: asyncio.Queue[_UploadBuffer | BaseException] = asyncio.Queue()  # an error is its last item
        self._taken: deque[_UploadBuffer] = deque()
        self._reading: asyncio.Task[None] | None = None

    def are_written(self, layer: int) -> bool:
        """Return whether the files have everything that updates so far made of the layer."""
        return not any(file.table.lacks(file.layout.state_of(layer)) for file in self._files)

    def expect(self, fragments: Sequence[FragmentId], generation: int, reached: Reached) -> None:
        """Start to read those of the fragments that are on disk. They will be taken in this order."""
        on_disk = [fragment for fragment in fragments if fragment.layer in self.layers]
        reading = self._read_all(on_disk, generation, reached, self._reading)
        self._reading = asyncio.create_task(reading, name="weights from disk")

    async def take(self, fragment: FragmentId) -> Sequence[WeightPart]:
        """Wait until the fragment has been read; return its elements, valid until the event passed to `release`.

        Raises what reading raised, and DeadlineError.
        """
        try:
            async with asyncio.timeout(self._deadline_s):
                buffer = await self._filled.get()
        except TimeoutError:
            raise DeadlineError(
                f"the weights of layer {fragment.layer} were not read from disk within {self._deadline_s:.0f} s"
            ) from None
        if isinstance(buffer, BaseException):
            self._filled.put_nowait(buffer)  # for the next one who takes
            raise buffer
        assert buffer.fragment == fragment
        self._taken.append(buffer)
        return buffer.parts

    def release(self, uploaded: Event) -> None:
        """Release the fragment that was taken first: it is not needed after the event `uploaded`."""
        emptied = self._taken.popleft().emptied
        assert emptied is not None
        emptied.set_result(uploaded)

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read_all(
        self, fragments: Sequence[FragmentId], generation: int, reached: Reached, before: asyncio.Task[None] | None
    ) -> None:
        """Read the fragments into buffers, one after another.

        before: the task that read for the previous step, and that closes its files. All its fragments were taken.
        """
        try:
            if before is not None:
                await before
            async with AsyncExitStack() as stack:
                blobs = [await stack.enter_async_context(file.store.update(file.name)) for file in self._files]
                for fragment in fragments:
                    buffer = await self._next_buffer()
                    await reached(fragment.layer, generation)
                    await self._fill(buffer, fragment, blobs)
        except BaseException as error:
            self._filled.put_nowait(error)

    async def _next_buffer(self) -> _UploadBuffer:
        buffer = self._buffers.popleft()
        if buffer.emptied is not None:
            uploaded = await buffer.emptied
            await asyncio.to_thread(uploaded.synchronize)
            if self._poison:
                buffer.memory.fill_(POISON)
        return buffer

    async def _fill(self, buffer: _UploadBuffer, fragment: FragmentId, blobs: Sequence[Blob]) -> None:
        room, at, buffer.parts = asyncio.Semaphore(TRANSFERS), 0, []
        try:
            async with asyncio.TaskGroup() as group:
                for shard, extent, span in self._wanted(fragment):
                    memory = buffer.memory[at : at + extent.working_bytes]
                    for index, block in enumerate(extent.working_blocks):  # the extent's first blocks
                        content = memory.numpy().data[slice(*block)]
                        group.create_task(self._read(shard, blobs[shard], extent, index, content, room))
                    values = memory[: extent.kinds[WORKING].size].view(self._dtype)
                    inside = values[span.start - extent.span.start : span.stop - extent.span.start]
                    buffer.parts.append(WeightPart(span.start, inside))
                    at += memory.nbytes
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        buffer.fragment, buffer.emptied = fragment, asyncio.get_running_loop().create_future()
        self._buffers.append(buffer)
        self._filled.put_nowait(buffer)

    async def _read(
        self, shard: int, blob: Blob, extent: Extent, index: int, content: memoryview, room: asyncio.Semaphore
    ) -> None:
        file = self._files[shard]
        async with room:
            where = file.store.describe(file.name)
            with self._spans.span(Row.DISK, "read weights", extent.layer, num_bytes=len(content)):
                await file.table.checksums.read_block(blob, where, extent, index, content)

    def _wanted(self, fragment: FragmentId) -> Iterator[tuple[int, Extent, ElementRange]]:
        """Yield each extent that has elements of the fragment: shard of its file, extent, and which elements."""
        span = self._layout.layers[fragment.layer].fragments[fragment.index]
        for shard, file in enumerate(self._files):
            for number, inside in file.layout.working_of(fragment.layer, span):
                yield shard, file.layout.extents[number], inside

    def _largest_bytes(self, layer: int) -> int:
        files = (file.layout for file in self._files)
        return sum(file.extents[number].working_bytes for file in files for number in file.state_of(layer))
