"""SpillRing: state to be updated and gradients that wait, between a blob on disk and slots in host memory.

Updates visit extents (plan/spill_layout.py) in their order, so what comes next is read ahead of it, and what was
updated is written behind it. Gradients go through the same slots, in the order in which they come: filled, written
behind. From the first of them to the next update nothing is read ahead. What moves is spill_transfers.py's business.

A slot is in shared memory and outlives the process that updates it. So that another one can go on, the table beside it
says which extent it holds (stored once that has been read, cleared before another one is) and whether it is ahead of
the blob (stored before the first write, cleared once the blob has it): then the slot is right and the blob is not.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TypeVar

from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import Span
from megatrain_ray.engine.plan.spill_layout import WORKING, SpillLayout
from megatrain_ray.engine.spill.spill_table import SpillTable
from megatrain_ray.engine.spill.spill_transfers import SpillTransfers
from megatrain_ray.io.storage.blob_store import BlobStore
from megatrain_ray.spans import Row, SpanLog

Found = TypeVar("Found")

POISON = 0xFF  # as bf16 and fp32 a NaN


class SlotState(Enum):
    """Of a slot."""

    EMPTY = "empty"
    FILLING = "being read from the blob"
    READY = "holds an extent"
    WRITING = "holds an extent, which is being written to the blob"


@dataclass
class _Slot:
    """`memory`: 1-D uint8. `is_held`: an update works on it."""

    index: int
    memory: Tensor
    state: SlotState = SlotState.EMPTY
    extent: int | None = None
    is_held: bool = False


class SpillRing:
    """Of one shard. `bring`, `change`, `leave`, `pause` and `blank` are for the thread that updates; `settle` and
    `read` for any other. `extent`: its number among `layout.extents`."""

    def __init__(
        self,
        layout: SpillLayout,
        memory: Tensor,
        store: BlobStore,
        name: str,
        timeout_s: float,
        *,
        poison: bool = False,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """`memory`: 1-D uint8, at least `layout.memory_bytes` from a multiple of ALIGN_BYTES on, zeros or what a ring
        that died left. `name`: of a blob in `store`, of `layout.blob_bytes`. `timeout_s`: of any wait. `poison`: slots
        are filled with NaN before they are read into. `written`: called, on a thread of the ring's, when the blob has
        a working copy that it lacked.

        Raises MegatrainError for a blob that is not there.
        """
        self.layout = layout
        self.spans = SpanLog()
        self._poison = poison
        self._written = written
        size = layout.slot_bytes
        self._slots = [_Slot(i, memory[i * size : (i + 1) * size]) for i in range(layout.num_slots)]
        self._table = SpillTable(layout, memory)
        self._changed = threading.Condition()
        self._at = 0  # of the order: what is wanted first
        self._reads_ahead = False  # not before there is something to read
        self._transfers = SpillTransfers(store, name, self._table.checksums, timeout_s, self._wake)
        if layout.extents:
            self._transfers.open()
            self._adopt()

    def bytes_of(self, extent: int) -> dict[str, Tensor]:
        """Of each kind of an extent that is in its slot: between `bring` and `leave`."""
        slot = self._slot_of(extent)
        assert slot is not None and slot.is_held
        return {kind: slot.memory[slice(*span)] for kind, span in self.layout.extents[extent].kinds.items()}

    def bring(self, extent: int) -> None:
        """Waits until the extent is in its slot, where it stays until `leave`. Those after it are read ahead.

        Raises MegatrainError for what cannot be read or is not what was written, DeadlineError.
        """
        with self._changed:
            self._at, self._reads_ahead = extent, True
            self._advance()
            slot = self._await_ready(extent)
            slot.is_held = True

    def change(self, extent: int) -> None:
        """Before the first write: from now on the slot is ahead of the blob."""
        slot = self._slot_of(extent)
        assert slot is not None and slot.is_held
        self._table.set_ahead(slot.index, True)

    def leave(self, extent: int) -> None:
        """The update is over: what it changed is written behind it, and the slot then has another extent."""
        with self._changed:
            slot = self._slot_of(extent)
            assert slot is not None and slot.is_held
            slot.is_held = False
            self._at = max(self._at, extent + 1)  # a gradient is left behind the state of its part
            if self._is_ahead(slot):
                self._write(slot)
            self._advance()

    def pause(self, extent: int) -> None:
        """Nobody works on the extent, unchanged, and its update is still to come: it stays, unless another is brought
        before."""
        with self._changed:
            slot = self._slot_of(extent)
            assert slot is not None and not self._is_ahead(slot)
            slot.is_held = False

    @contextmanager
    def blank(self, extent: int) -> Iterator[None]:
        """A slot that the block fills for the extent, whatever the blob has; it is written after the block."""
        with self._changed:
            self._reads_ahead = False  # what is to be filled has every slot
            slot = self._await(partial(self._slot_to_fill, extent), f"a slot for {self._described(extent)}")
            self._clear(slot)
            self._hold(slot, extent)
            slot.is_held = True
        self.change(extent)
        yield
        self.leave(extent)

    def settle(self, extent: int) -> None:
        """Waits until the blob has all that updates made of the extent."""
        with self._changed:
            self._await(lambda: not self._is_on_its_way(extent), f"{self._described(extent)} to be written")

    def read(self, extent: int, span: Span) -> memoryview:
        """Bytes of an extent, once the blob has all that updates made of it. No update of it may begin before this
        returns. Raises as `bring` does."""
        self.settle(extent)
        result = memoryview(bytearray(span.size))
        for index, block in enumerate(self.layout.extents[extent].blocks):
            first, last = max(span.start, block.start), min(span.stop, block.stop)
            if first < last:
                content = self._transfers.block(self.layout.extents[extent], index)
                result[first - span.start : last - span.start] = content[first - block.start : last - block.start]
        return result

    def close(self) -> None:
        """Whoever waits fails, and what is on its way is given up: it is lost with the blob. Idempotent."""
        with self._changed:
            self._reads_ahead = False  # nothing more begins
        self._transfers.close()

    def _adopt(self) -> None:
        """What the slots hold, where another process was here before."""
        with self._changed:
            for slot in self._slots:
                slot.extent = self._table.extent_of(slot.index)
                if slot.extent is not None:
                    slot.state = SlotState.READY
                    if self._is_ahead(slot):
                        self._write(slot)

    def _advance(self) -> None:
        """Reads ahead into every slot that holds nothing which comes before. With the condition held."""
        if not self._reads_ahead or self._transfers.error is not None:
            return
        held = {slot.extent for slot in self._slots}
        for extent in self._coming():
            if extent in held:
                continue
            slot = self._free_slot(extent)
            if slot is None:
                return
            self._clear(slot)
            slot.extent, slot.state = extent, SlotState.FILLING
            self._transfers.submit(self._fill(slot, extent))

    def _coming(self) -> Sequence[int]:
        """The extents that updates visit next, as many as there are slots: those of this update alone where gradients
        of the next one are to come."""
        following = range(self._at, self._at + len(self._slots))
        if self.layout.stores_gradients:
            return following[: max(0, len(self.layout.extents) - self._at)]
        return [i % len(self.layout.extents) for i in following]

    def _free_slot(self, extent: int) -> _Slot | None:
        """One that is empty, or holds what comes last, unchanged and in nobody's hands; not what comes before `extent`.
        What comes after it may have to be read once more: a slot that is held is one less for what comes."""
        coming = [*self._coming()] if self._reads_ahead else []

        def comes(number: int | None) -> float:
            return coming.index(number) if number in coming else math.inf

        free = [slot for slot in self._slots if slot.state is SlotState.EMPTY or self._is_idle(slot)]
        latest = max(free, key=lambda slot: comes(slot.extent), default=None)
        return latest if latest and (not coming or comes(latest.extent) > comes(extent)) else None

    def _slot_to_fill(self, extent: int) -> _Slot | None:
        """The extent's own where a process that died while it filled slots left it one: a second one would be as good
        as this one to `bring`."""
        slot = self._slot_of(extent)
        if slot is None:
            return self._free_slot(extent)
        return slot if self._is_idle(slot) else None

    def _is_idle(self, slot: _Slot) -> bool:
        return slot.state is SlotState.READY and not slot.is_held and not self._is_ahead(slot)

    def _clear(self, slot: _Slot) -> None:
        self._table.hold(slot.index, None)
        slot.extent, slot.state = None, SlotState.EMPTY
        if self._poison:
            slot.memory.fill_(POISON)

    def _hold(self, slot: _Slot, extent: int) -> None:
        slot.extent, slot.state = extent, SlotState.READY
        self._table.hold(slot.index, extent)

    def _write(self, slot: _Slot) -> None:
        assert slot.extent is not None
        slot.state = SlotState.WRITING
        self._transfers.submit(self._empty(slot, slot.extent))

    def _slot_of(self, extent: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.extent == extent), None)

    def _is_ahead(self, slot: _Slot) -> bool:
        return self._table.is_ahead(slot.index)

    def _is_on_its_way(self, extent: int) -> bool:
        slot = self._slot_of(extent)
        return slot is not None and self._is_ahead(slot)

    def _await_ready(self, extent: int) -> _Slot:
        def ready() -> _Slot | None:
            slot = self._slot_of(extent)
            return slot if slot is not None and slot.state is SlotState.READY else None

        return self._await(ready, f"{self._described(extent)} to be read")

    def _described(self, extent: int) -> str:
        of = self.layout.extents[extent]
        return f"elements {of.span.start} to {of.span.stop} of layer {of.layer}"

    def _await(self, condition: Callable[[], Found | None], what: str) -> Found:
        """What the condition gives, once that is neither None nor False. With the lock held."""
        return self._transfers.wait_for(self._changed, condition, what)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    async def _fill(self, slot: _Slot, number: int) -> None:
        memory, extent = slot.memory.numpy().data, self.layout.extents[number]
        with self.spans.span(Row.DISK, "read", extent.layer, num_bytes=extent.nbytes):
            await self._transfers.read(extent, memory)
        with self._changed:
            self._hold(slot, number)
            self._advance()  # what is wanted may have changed meanwhile
            self._changed.notify_all()

    async def _empty(self, slot: _Slot, number: int) -> None:
        memory, extent = slot.memory.numpy().data, self.layout.extents[number]
        with self.spans.span(Row.DISK, "write", extent.layer, num_bytes=extent.nbytes):
            await self._transfers.write(extent, memory)
        with self._changed:
            self._table.set_ahead(slot.index, False)
            slot.state = SlotState.READY
            self._advance()
            self._changed.notify_all()
        if WORKING in extent.kinds:
            self._written()
