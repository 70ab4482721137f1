"""SpillRing: optimizer state on its way between a blob on disk and the slots in host memory where it is updated.

Updates visit layers in an order that is known, so what comes next is read ahead of it, and what was updated is written
behind it. Transfers are asyncio tasks of an event loop in a thread of its own, blocks of several layers at once.

A slot is in shared memory and outlives the process that updates it. So that another one can go on, the table beside it
says which layer it holds (stored once that has been read, cleared before another one is) and whether it is ahead of the
blob (stored before the first write, cleared once the blob has it): then the slot is right and the blob is not. Every
block has a checksum in the table: a block that comes back as something else than what was written fails the run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from megatrain_ray.engine.flat_layout import Span
from megatrain_ray.engine.spill_layout import SLOT_WORDS, Extent, SpillLayout
from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.blob_store import Blob, BlobStore, aligned_block
from megatrain_ray.io.words import Words
from megatrain_ray.spans import Row, SpanLog

Found = TypeVar("Found")

TRANSFERS = 8  # blocks on their way at once, those of all slots together
CLOSE_S = 1.0  # for what a disk is at when nobody needs it any more: blocks of a few MiB
POISON = 0xFF  # as bf16 and fp32 a NaN


class SlotState(Enum):
    """Of a slot."""

    EMPTY = "empty"
    FILLING = "being read from the blob"
    READY = "holds a layer"
    WRITING = "holds a layer, which is being written to the blob"


@dataclass
class _Slot:
    """`memory`: 1-D uint8. `is_held`: an update works on it."""

    index: int
    memory: Tensor
    state: SlotState = SlotState.EMPTY
    layer: int | None = None
    is_held: bool = False


class _Block(NamedTuple):
    number: int
    checksum: int
    content: memoryview


class SpillRing:
    """Of one shard. `bring`, `change`, `leave` and `blank` are for the thread that updates; `read` for any other."""

    def __init__(
        self,
        layout: SpillLayout,
        memory: Tensor,
        store: BlobStore,
        name: str,
        timeout_s: float,
        *,
        poison: bool = False,
    ) -> None:
        """`memory`: 1-D uint8, at least `layout.memory_bytes` from a multiple of ALIGN_BYTES on, zeros or what a ring
        that died left. `name`: of a blob in `store`, of `layout.blob_bytes`. `timeout_s`: of any wait. `poison`: slots
        are filled with NaN before they are read into.

        Raises MegatrainError for a blob that is not there.
        """
        self._layout = layout
        self._order = tuple(layout.extents)
        self._store = store
        self._name = name
        self._timeout_s = timeout_s
        self.spans = SpanLog()
        self._poison = poison
        size, table = layout.slot_bytes, layout.num_slots * layout.slot_bytes
        self._slots = [_Slot(i, memory[i * size : (i + 1) * size]) for i in range(layout.num_slots)]
        self._words = Words(memory[table : layout.memory_bytes].numpy().data, layout.num_words)
        self._changed = threading.Condition()
        self._at = 0  # of the order: what is wanted first
        self._reads_ahead = False  # not before there is something to read
        self._error: Exception | None = None
        self._last = _Block(-1, 0, memoryview(b""))  # that `read` has read
        self._blob: Blob
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"spill {name}", daemon=True)
        if self._order:
            self._thread.start()
            self._started.wait()
            if self._error is not None:
                raise self._error
            self._adopt()

    def state_of(self, layer: int) -> dict[str, Tensor]:
        """The bytes of each kind of a layer that is in its slot: between `bring` and `leave`."""
        slot = self._slot_of(layer)
        assert slot is not None and slot.is_held
        return {kind: slot.memory[slice(*span)] for kind, span in self._layout.extents[layer].kinds.items()}

    @property
    def extents(self) -> Mapping[int, Extent]:
        """By layer, of those that the shard spills."""
        return self._layout.extents

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that spill, in the order of updates."""
        return self._order

    def bring(self, layer: int) -> None:
        """Waits until the layer is in its slot, where it stays until `leave`. The layers after it are read ahead.

        Raises MegatrainError for what cannot be read or is not what was written, DeadlineError.
        """
        with self._changed:
            self._at, self._reads_ahead = self._order.index(layer), True
            self._advance()
            slot = self._await_ready(layer)
            slot.is_held = True

    def change(self, layer: int) -> None:
        """Before the first write: from now on the slot is ahead of the blob."""
        slot = self._slot_of(layer)
        assert slot is not None and slot.is_held
        self._words.store(SLOT_WORDS * slot.index + 1, 1)

    def leave(self, layer: int) -> None:
        """The update is over: what it changed is written behind it, and the slot then has another layer."""
        with self._changed:
            slot = self._slot_of(layer)
            assert slot is not None and slot.is_held
            slot.is_held = False
            self._at = (self._order.index(layer) + 1) % len(self._order)
            if self._is_ahead(slot):
                self._write(slot)
            self._advance()

    def pause(self, layer: int) -> None:
        """Nobody works on the layer, unchanged, and its update is still to come: it stays, unless another is brought
        before."""
        with self._changed:
            slot = self._slot_of(layer)
            assert slot is not None and not self._is_ahead(slot)
            slot.is_held = False

    @contextmanager
    def blank(self, layer: int) -> Iterator[None]:
        """A slot that the block fills for the layer, whatever the blob has; it is written after the block."""
        with self._changed:
            slot = self._await(partial(self._slot_to_fill, layer), f"a slot for layer {layer}")
            self._clear(slot)
            self._hold(slot, layer)
            slot.is_held = True
        self.change(layer)
        yield
        self.leave(layer)

    def read(self, layer: int, span: Span) -> memoryview:
        """Bytes of a layer's extent, once the blob has all that updates made of it. No update of the layer may begin
        before this returns. Raises as `bring` does."""
        extent = self._layout.extents[layer]
        with self._changed:
            self._await(lambda: not self._is_on_its_way(layer), f"layer {layer} to be written")
        result = memoryview(bytearray(span.size))
        for index, block in enumerate(extent.blocks):
            first, last = max(span.start, block.start), min(span.stop, block.stop)
            if first < last:
                content = self._block(extent, index, block)
                result[first - span.start : last - span.start] = content[first - block.start : last - block.start]
        return result

    def close(self) -> None:
        """Whoever waits fails, and what is on its way is given up: it is lost with the blob. A block that a disk is at
        is waited for, but not for long. Idempotent."""
        self._fail(MegatrainError(f"{self._store.describe(self._name)} is not used any more"))
        if self._thread.is_alive():
            with self._changed:
                self._reads_ahead = False  # nothing more begins
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_S)

    def _adopt(self) -> None:
        """What the slots hold, where another process was here before."""
        with self._changed:
            for slot in self._slots:
                holds = self._words.load(SLOT_WORDS * slot.index)
                if holds:
                    slot.layer, slot.state = holds - 1, SlotState.READY
                    if self._is_ahead(slot):
                        self._write(slot)

    def _advance(self) -> None:
        """Reads ahead into every slot that holds nothing which comes before. With the condition held."""
        if not self._reads_ahead or self._error is not None:
            return
        held = {slot.layer for slot in self._slots}
        for layer in self._coming():
            if layer in held:
                continue
            slot = self._free_slot()
            if slot is None:
                return
            self._clear(slot)
            slot.layer, slot.state = layer, SlotState.FILLING
            self._submit(self._fill(slot, self._layout.extents[layer]))

    def _coming(self) -> tuple[int, ...]:
        """The layers that updates visit next, as many as there are slots."""
        return (self._order[self._at :] + self._order)[: len(self._slots)]

    def _free_slot(self) -> _Slot | None:
        """One that is empty, or holds what comes last, unchanged and in nobody's hands."""
        coming = self._coming() if self._reads_ahead else ()
        for slot in self._slots:
            if slot.state is SlotState.EMPTY:
                return slot
            if self._is_idle(slot) and slot.layer not in coming:
                return slot
        return None

    def _slot_to_fill(self, layer: int) -> _Slot | None:
        """The layer's own where a process that died while it filled slots left it one: a second one would be as good
        as this one to `bring`."""
        slot = self._slot_of(layer)
        if slot is None:
            return self._free_slot()
        return slot if self._is_idle(slot) else None

    def _is_idle(self, slot: _Slot) -> bool:
        return slot.state is SlotState.READY and not slot.is_held and not self._is_ahead(slot)

    def _clear(self, slot: _Slot) -> None:
        self._words.store(SLOT_WORDS * slot.index, 0)
        slot.layer, slot.state = None, SlotState.EMPTY
        if self._poison:
            slot.memory.fill_(POISON)

    def _hold(self, slot: _Slot, layer: int) -> None:
        slot.layer, slot.state = layer, SlotState.READY
        self._words.store(SLOT_WORDS * slot.index, layer + 1)

    def _write(self, slot: _Slot) -> None:
        assert slot.layer is not None
        slot.state = SlotState.WRITING
        self._submit(self._empty(slot, self._layout.extents[slot.layer]))

    def _slot_of(self, layer: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.layer == layer), None)

    def _is_ahead(self, slot: _Slot) -> bool:
        return self._words.load(SLOT_WORDS * slot.index + 1) == 1

    def _is_on_its_way(self, layer: int) -> bool:
        slot = self._slot_of(layer)
        return slot is not None and self._is_ahead(slot)

    def _await_ready(self, layer: int) -> _Slot:
        def ready() -> _Slot | None:
            slot = self._slot_of(layer)
            return slot if slot is not None and slot.state is SlotState.READY else None

        return self._await(ready, f"layer {layer} to be read")

    def _await(self, condition: Callable[[], Found | None], what: str) -> Found:
        """What the condition gives, once that is neither None nor False. With the lock held."""
        deadline_s = time.monotonic() + self._timeout_s
        while not (found := condition()):
            if self._error is not None:
                raise self._error
            if time.monotonic() > deadline_s:
                raise self._late(what)
            self._changed.wait(deadline_s - time.monotonic())
        return found

    def _late(self, what: str) -> DeadlineError:
        where = self._store.describe(self._name)
        return DeadlineError(f"waited {self._timeout_s:.0f} s for {what}: {where} does not get on")

    # What follows runs on the event loop, or hands something to it.

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(TRANSFERS))  # by itself it has fewer on few cores
        self._closing, self._room = asyncio.Event(), asyncio.Semaphore(TRANSFERS)
        try:
            async with self._store.update(self._name) as self._blob:
                self._started.set()
                await self._closing.wait()
                await _give_up(asyncio.all_tasks() - {asyncio.current_task()})  # while the blob is open
        except Exception as error:
            self._fail(error)
        finally:
            self._started.set()

    def _submit(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Whoever waits hears of it; the first one counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    async def _fill(self, slot: _Slot, extent: Extent) -> None:
        memory, blocks = slot.memory.numpy().data, enumerate(extent.blocks)
        assert slot.layer is not None
        with self.spans.span(Row.DISK, "read", slot.layer, num_bytes=extent.nbytes):
            await asyncio.gather(*(self._read_block(extent, i, block, memory[slice(*block)]) for i, block in blocks))
        with self._changed:
            self._hold(slot, slot.layer)
            self._advance()  # what is wanted may have changed meanwhile
            self._changed.notify_all()

    async def _empty(self, slot: _Slot, extent: Extent) -> None:
        memory, blocks = slot.memory.numpy().data, enumerate(extent.blocks)
        assert slot.layer is not None
        with self.spans.span(Row.DISK, "write", slot.layer, num_bytes=extent.nbytes):
            await asyncio.gather(*(self._write_block(extent, i, block, memory[slice(*block)]) for i, block in blocks))
        with self._changed:
            self._words.store(SLOT_WORDS * slot.index + 1, 0)
            slot.state = SlotState.READY
            self._advance()
            self._changed.notify_all()

    async def _read_block(self, extent: Extent, index: int, block: Span, memory: memoryview) -> None:
        async with self._room:
            await self._blob.read_into(extent.start + block.start, memory)
            found = await asyncio.to_thread(_checksum, memory)
        expected = self._words.load(self._word_of(extent, index))
        if found != expected:
            raise MegatrainError(
                f"{self._store.describe(self._name)}: bytes {extent.start + block.start} to "
                f"{extent.start + block.stop} are not what was written there (checksum {found & 2**64 - 1:#x}, "
                f"expected {expected & 2**64 - 1:#x}): the disk or its memory is damaged; go on from the last save on "
                "another spill.path"
            )

    async def _write_block(self, extent: Extent, index: int, block: Span, memory: memoryview) -> None:
        async with self._room:
            self._words.store(self._word_of(extent, index), await asyncio.to_thread(_checksum, memory))
            await self._blob.write_at(extent.start + block.start, memory)

    def _word_of(self, extent: Extent, index: int) -> int:
        return SLOT_WORDS * self._layout.num_slots + extent.first_block + index

    def _block(self, extent: Extent, index: int, block: Span) -> memoryview:
        """A block as the blob has it. Parts of a save follow each other, so two often want the same one."""
        number, checksum = extent.first_block + index, self._words.load(self._word_of(extent, index))
        last = self._last  # that of an abandoned save may be replaced at any time
        if (last.number, last.checksum) != (number, checksum):
            memory = aligned_block(block.size)
            self._finish(self._read_block(extent, index, block, memory), f"block {number} to be read")
            last = self._last = _Block(number, checksum, memory)
        return last.content

    def _finish(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Waits for it."""
        with self._changed:
            if self._error is not None:
                work.close()
                raise self._error
            done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            done.result(self._timeout_s)
        except TimeoutError:
            raise self._late(what) from None
        except CancelledError:
            assert self._error is not None  # which is why
            raise self._error from None


async def _give_up(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Returns when nothing of them goes on; transfers that have begun are at their end then."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _checksum(memory: memoryview) -> int:
    """The sum of its 64-bit words. It costs little (50 GB/s on one core of a small machine, the block in its caches),
    and what a disk does to a block, another block, an older one, zeros, flipped bits, changes it."""
    return int(np.frombuffer(memory, np.int64).sum())
