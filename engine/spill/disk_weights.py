"""DiskWeights: working copies that are on disk, on their way to the device.

The shards' files hold them (plan/spill_layout.py), since an update brings them with the state. What the device needs is
known before a step begins, so it is read ahead, in the order of the uploads, into a few windows of host memory. It is
read once the files have all that updates made of it, which the tables beside the shards' slots tell, and held to the
checksums there.
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
from megatrain_ray.engine.device.task_failures import first_failure
from megatrain_ray.engine.layout.flat_layout import Span
from megatrain_ray.engine.layout.model_layout import ModelLayout, WeightPart
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.plan.spill_layout import WORKING, Extent, SpillLayout
from megatrain_ray.engine.spill.spill_ring import POISON
from megatrain_ray.engine.spill.spill_table import SpillTable
from megatrain_ray.engine.spill.spill_transfers import TRANSFERS, read_block
from megatrain_ray.errors import DeadlineError
from megatrain_ray.io.storage.blob_store import Blob, BlobStore, aligned_block
from megatrain_ray.spans import Row, SpanLog

Reached = Callable[[int, int], Awaitable[None]]  # waits until a layer has a generation, and the files have it


class ShardFile(NamedTuple):
    """What one shard has on disk. `name`: of the blob in `store`."""

    layout: SpillLayout
    table: SpillTable
    store: BlobStore
    name: str


@dataclass
class _Window:
    """`memory`: 1-D uint8. `emptied`: the copy to the device after which it may be filled again."""

    memory: torch.Tensor
    fragment: FragmentId | None = None
    parts: list[WeightPart] = field(default_factory=list)
    emptied: asyncio.Future[Event] | None = None


class DiskWeights:
    """Of one plan. On one event loop. What is expected is taken and let go of in the same order."""

    def __init__(
        self,
        plan: Plan,
        layout: ModelLayout,
        files: Sequence[ShardFile],
        *,
        spans: SpanLog | None = None,
        poison: bool = False,
    ) -> None:
        """`files`: of all shards that own something of these layers. `spans`: gets what is read, and when. `poison`:
        windows that were let go of are filled with NaN before they are read into."""
        self.layers = plan.weights_on_disk
        self._layout = layout
        self._files = files
        self._dtype = plan.precision.working_dtype
        self._deadline_s = plan.update_deadline_s
        self._spans = spans or SpanLog()
        self._poison = poison
        size = max(map(self._largest_bytes, self.layers))
        self.memory = torch.frombuffer(aligned_block(plan.weight_windows * size), dtype=torch.uint8)
        self._windows = deque(_Window(self.memory[i * size :][:size]) for i in range(plan.weight_windows))
        self._filled: deque[_Window] = deque()
        self._taken: deque[_Window] = deque()
        self._changed = asyncio.Condition()
        self._error: BaseException | None = None
        self._reading: asyncio.Task[None] | None = None

    def are_written(self, layer: int) -> bool:
        """Whether the files have all that the updates so far made of a layer."""
        return not any(file.table.lacks(file.layout.state_of(layer)) for file in self._files)

    def expect(self, fragments: Sequence[FragmentId], generation: int, reached: Reached) -> None:
        """Begins to read what is on disk of these, which will be taken one after the other."""
        of_disk = [fragment for fragment in fragments if fragment.layer in self.layers]
        reading = self._read_all(of_disk, generation, reached, self._reading)
        self._reading = asyncio.create_task(reading, name="weights from disk")

    async def take(self, fragment: FragmentId) -> Sequence[WeightPart]:
        """Its elements, in a window until the event of `release`. Raises what reading raised, and DeadlineError."""
        try:
            async with asyncio.timeout(self._deadline_s), self._changed:
                await self._changed.wait_for(lambda: self._filled or self._error)
        except TimeoutError:
            raise DeadlineError(
                f"the weights of layer {fragment.layer} were not read from disk within {self._deadline_s:.0f} s"
            ) from None
        if self._error is not None:
            raise self._error
        window = self._filled.popleft()
        assert window.fragment == fragment
        self._taken.append(window)
        return window.parts

    def release(self, uploaded: Event) -> None:
        """What was taken first is not needed after the event."""
        emptied = self._taken.popleft().emptied
        assert emptied is not None
        emptied.set_result(uploaded)

    async def close(self) -> None:
        """Reads nothing more. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read_all(
        self, fragments: Sequence[FragmentId], generation: int, reached: Reached, before: asyncio.Task[None] | None
    ) -> None:
        """`before`: what closes the files of the step before, all of whose fragments were taken."""
        try:
            if before is not None:
                await before
            async with AsyncExitStack() as stack:
                blobs = [await stack.enter_async_context(file.store.update(file.name)) for file in self._files]
                for fragment in fragments:
                    window = await self._next_window()
                    await reached(fragment.layer, generation)
                    await self._fill(window, fragment, blobs)
        except BaseException as error:
            self._error = error
            async with self._changed:
                self._changed.notify_all()

    async def _next_window(self) -> _Window:
        window = self._windows.popleft()
        if window.emptied is not None:
            uploaded = await window.emptied
            await asyncio.to_thread(uploaded.synchronize)
            if self._poison:
                window.memory.fill_(POISON)
        return window

    async def _fill(self, window: _Window, fragment: FragmentId, blobs: Sequence[Blob]) -> None:
        room, at, window.parts = asyncio.Semaphore(TRANSFERS), 0, []
        try:
            async with asyncio.TaskGroup() as group:
                for shard, extent, span in self._wanted(fragment):
                    memory = window.memory[at : at + extent.working_bytes]
                    for index, block in enumerate(extent.working_blocks):
                        content = memory.numpy().data[slice(*block)]
                        group.create_task(self._read(shard, blobs[shard], extent, index, content, room))
                    values = memory[: extent.kinds[WORKING].size].view(self._dtype)
                    inside = values[span.start - extent.span.start : span.stop - extent.span.start]
                    window.parts.append(WeightPart(span.start, inside))
                    at += memory.nbytes
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        await self._offer(window, fragment)

    async def _read(
        self, shard: int, blob: Blob, extent: Extent, index: int, content: memoryview, room: asyncio.Semaphore
    ) -> None:
        file, block = self._files[shard], extent.working_blocks[index]
        async with room:
            where = file.store.describe(file.name)
            with self._spans.span(Row.DISK, "read weights", extent.layer, num_bytes=len(content)):
                await read_block(blob, where, file.table.checksums, extent, index, block, content)

    async def _offer(self, window: _Window, fragment: FragmentId) -> None:
        window.fragment, window.emptied = fragment, asyncio.get_running_loop().create_future()
        self._windows.append(window)
        async with self._changed:
            self._filled.append(window)
            self._changed.notify_all()

    def _wanted(self, fragment: FragmentId) -> Iterator[tuple[int, Extent, Span]]:
        """The extents with something of the fragment, whose file each is in, and which elements."""
        span = self._layout.layers[fragment.layer].fragments[fragment.index]
        for shard, file in enumerate(self._files):
            for number, inside in file.layout.working_of(fragment.layer, span):
                yield shard, file.layout.extents[number], inside

    def _largest_bytes(self, layer: int) -> int:
        """In a window, of a fragment of the layer at most."""
        files = (file.layout for file in self._files)
        return sum(file.extents[number].working_bytes for file in files for number in file.state_of(layer))
