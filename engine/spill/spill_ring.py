"""Moves state and waiting gradients between a blob on disk and slots in host memory.

Updates visit extents (plan/spill_layout.py) in their order. So the extents that follow are read ahead, and updated ones
are written while the next ones are updated. Gradients pass through the same slots in the order in which they arrive: a
slot is filled, and then written in the same way. From the first of them until the next update, nothing is read ahead.
The transfers themselves are in spill_transfers.py.

A slot is in shared memory and outlives the process that updates it. So that another process can go on, the table next
to it says which extent it holds. That is stored once the extent has been read, and cleared before another one is read.
The table also says whether the slot is dirty: it holds changes that the blob lacks. That is stored before the first
write, and cleared once the blob has what was written. While it is set, the slot is right and the blob is not.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial

from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.plan.spill_layout import WORKING, SpillLayout
from megatrain_ray.engine.spill.spill_table import SpillTable
from megatrain_ray.engine.spill.spill_transfers import SpillTransfers
from megatrain_ray.io.storage.blob_store import BlobStore
from megatrain_ray.spans import Row, SpanLog

POISON = 0xFF  # repeated, it is a NaN in bf16 and fp32


class SpillSlotState(Enum):
    """Says what a slot holds and whether it is being transferred."""

    EMPTY = "empty"
    FILLING = "being read from the blob"
    READY = "holds an extent"
    WRITING = "holds an extent, which is being written to the blob"


@dataclass
class _SpillSlot:
    index: int
    memory: Tensor  # 1-D uint8
    state: SpillSlotState = SpillSlotState.EMPTY
    extent: int | None = None
    is_acquired: bool = False  # an update works on it


class SpillRing:
    """Brings one shard's extents into slots of host memory and writes them back.

    `acquire`, `mark_dirty`, `release`, `release_unchanged` and `overwrite` are for the thread that updates,
    `wait_written` and `read` for any other. An `extent` is given by its number among `layout.extents`.
    """

    def __init__(
        self, layout: SpillLayout, memory: Tensor, store: BlobStore, name: str, timeout_s: float, *,
        poison: bool = False, written: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Open the blob, and go on from what the slots hold.

        memory: 1-D uint8, at least `layout.memory_bytes`, from a multiple of ALIGN_BYTES on. It holds zeros, or what a
            ring that died left.
        name: name of a blob in `store`, of `layout.blob_bytes`.
        timeout_s: limit of every wait.
        poison: fill slots with NaN before they are read into.
        written: called, on a thread of the ring's, when a working copy that the blob lacked has been written to it.

        Raises MegatrainError if the blob does not exist.
        """
        self.layout = layout
        self.spans = SpanLog()
        self._poison = poison
        self._written = written
        size = layout.slot_bytes
        self._slots = [_SpillSlot(i, memory[i * size : (i + 1) * size]) for i in range(layout.num_slots)]
        self._table = SpillTable(layout, memory)
        self._changed = threading.Condition()
        self._at = 0  # number of the extent that is wanted next
        self._reads_ahead = False  # False while there is nothing to read yet
        self._transfers = SpillTransfers(store, name, self._table.checksums, timeout_s, self._wake)
        if layout.extents:
            self._transfers.open()
            self._adopt()

    def bytes_of(self, extent: int) -> dict[str, Tensor]:
        """Return the bytes of an extent in its slot, by kind. Valid between `acquire` and `release`."""
        slot = self._acquired(extent)
        return {kind: slot.memory[slice(*span)] for kind, span in self.layout.extents[extent].kinds.items()}

    def acquire(self, extent: int) -> None:
        """Wait until the extent is in its slot, where it stays until `release`. Read the extents after it ahead.

        Raises MegatrainError if it cannot be read or is not what was written, and DeadlineError.
        """
        with self._changed:
            self._at, self._reads_ahead = extent, True
            self._advance()
            what = f"{self._described(extent)} to be read"
            slot = self._transfers.wait_for(self._changed, partial(self._ready_slot, extent), what)
            slot.is_acquired = True

    def mark_dirty(self, extent: int) -> None:
        """Mark the extent's slot as dirty. Call it before the first write."""
        self._table.set_dirty(self._acquired(extent).index, True)

    def release(self, extent: int) -> None:
        """End the work on an extent. If it was changed, it is written to the blob while other work goes on.

        The slot may then take another extent.
        """
        with self._changed:
            slot = self._acquired(extent)
            slot.is_acquired = False
            self._at = max(self._at, extent + 1)  # a gradient is left only after the state of its part
            if self._is_dirty(slot):
                self._write(slot)
            self._advance()

    def release_unchanged(self, extent: int) -> None:
        """End the work on an extent that is unchanged and whose update is still to come.

        It stays in its slot, unless another extent needs that slot first.
        """
        with self._changed:
            slot = self._acquired(extent)
            assert not self._is_dirty(slot)
            slot.is_acquired = False

    @contextmanager
    def overwrite(self, extent: int) -> Iterator[None]:
        """Provide a slot that the `with` block fills for the extent, whatever the blob has.

        It is written to the blob after the block.
        """
        with self._changed:
            self._reads_ahead = False  # until the next `acquire`, all slots are for extents that are filled
            what = f"a slot for {self._described(extent)}"
            slot = self._transfers.wait_for(self._changed, partial(self._slot_to_fill, extent), what)
            self._clear(slot)
            self._hold(slot, extent)
            slot.is_acquired = True
        self.mark_dirty(extent)
        yield
        self.release(extent)

    def wait_written(self, extent: int) -> None:
        """Wait until the blob has everything that updates made of the extent."""
        with self._changed:
            what = f"{self._described(extent)} to be written"
            self._transfers.wait_for(self._changed, lambda: not self._table.lacks([extent]), what)

    def read(self, extent: int, span: ElementRange) -> memoryview:
        """Return bytes of an extent, once the blob has everything that updates made of it.

        span: which bytes of the extent.

        No update of the extent may begin before this returns. Raises what `acquire` raises.
        """
        self.wait_written(extent)
        result = memoryview(bytearray(span.size))
        for index, block in enumerate(self.layout.extents[extent].blocks):
            first, last = max(span.start, block.start), min(span.stop, block.stop)
            if first < last:
                content = self._transfers.block(self.layout.extents[extent], index)
                result[first - span.start : last - span.start] = content[first - block.start : last - block.start]
        return result

    def close(self) -> None:
        """Make every waiting thread raise, and cancel transfers that are under way. Idempotent.

        What they carried is lost, with the blob.
        """
        with self._changed:
            self._reads_ahead = False  # no further transfer begins
        self._transfers.close()

    def _adopt(self) -> None:
        """Go on from what slots hold if another process used them before, and write what is dirty."""
        with self._changed:
            for slot in self._slots:
                slot.extent = self._table.extent_of(slot.index)
                if slot.extent is not None:
                    slot.state = SpillSlotState.READY
                    if self._is_dirty(slot):
                        self._write(slot)

    def _advance(self) -> None:
        """Start to read the next extents into slots that hold nothing that is needed earlier.

        Call it with the condition held.
        """
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
            slot.extent, slot.state = extent, SpillSlotState.FILLING
            self._transfers.submit(self._fill(slot, extent))

    def _coming(self) -> Sequence[int]:
        """Return the extents that updates visit next, as many as there are slots.

        If gradients are stored, only those of this update: gradients of the next one come first.
        """
        following = range(self._at, self._at + len(self._slots))
        if self.layout.stores_gradients:
            return following[: max(0, len(self.layout.extents) - self._at)]
        return [i % len(self.layout.extents) for i in following]

    def _free_slot(self, extent: int) -> _SpillSlot | None:
        """Pick a slot to evict: an empty one, else the idle one whose extent is needed furthest in the future.

        Idle means that its extent is unchanged and nobody works on it. An extent that is needed before `extent` is
        never evicted. One that is needed after it may have to be read again: every slot in use is one less for the
        extents to come. Returns None if there is no such slot.
        """
        coming = [*self._coming()] if self._reads_ahead else []

        def comes(number: int | None) -> float:
            return coming.index(number) if number in coming else math.inf

        free = [slot for slot in self._slots if slot.state is SpillSlotState.EMPTY or self._is_idle(slot)]
        latest = max(free, key=lambda slot: comes(slot.extent), default=None)
        return latest if latest and (not coming or comes(latest.extent) > comes(extent)) else None

    def _slot_to_fill(self, extent: int) -> _SpillSlot | None:
        """Pick a slot to fill with the extent: its own if it has one, else a slot to evict. None while there is none.

        A process that died while it filled slots may have left the extent in one. `acquire` could not tell a second
        slot with this extent from that one.
        """
        slot = self._slot_of(extent)
        if slot is None:
            return self._free_slot(extent)
        return slot if self._is_idle(slot) else None

    def _is_idle(self, slot: _SpillSlot) -> bool:
        return slot.state is SpillSlotState.READY and not slot.is_acquired and not self._is_dirty(slot)

    def _clear(self, slot: _SpillSlot) -> None:
        self._table.hold(slot.index, None)
        slot.extent, slot.state = None, SpillSlotState.EMPTY
        if self._poison:
            slot.memory.fill_(POISON)

    def _hold(self, slot: _SpillSlot, extent: int) -> None:
        slot.extent, slot.state = extent, SpillSlotState.READY
        self._table.hold(slot.index, extent)

    def _write(self, slot: _SpillSlot) -> None:
        assert slot.extent is not None
        slot.state = SpillSlotState.WRITING
        self._transfers.submit(self._empty(slot, slot.extent))

    def _slot_of(self, extent: int) -> _SpillSlot | None:
        return next((slot for slot in self._slots if slot.extent == extent), None)

    def _is_dirty(self, slot: _SpillSlot) -> bool:
        return self._table.is_dirty(slot.index)

    def _ready_slot(self, extent: int) -> _SpillSlot | None:
        slot = self._slot_of(extent)
        return slot if slot and slot.state is SpillSlotState.READY else None

    def _acquired(self, extent: int) -> _SpillSlot:
        slot = self._slot_of(extent)
        assert slot is not None and slot.is_acquired
        return slot

    def _described(self, extent: int) -> str:
        part = self.layout.extents[extent]
        return f"elements {part.span.start} to {part.span.stop} of layer {part.layer}"

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    async def _fill(self, slot: _SpillSlot, number: int) -> None:
        memory, extent = slot.memory.numpy().data, self.layout.extents[number]
        with self.spans.span(Row.DISK, "read", extent.layer, num_bytes=extent.nbytes):
            await self._transfers.read(extent, memory)
        with self._changed:
            self._hold(slot, number)
            self._advance()  # what is wanted may have changed meanwhile
            self._changed.notify_all()

    async def _empty(self, slot: _SpillSlot, number: int) -> None:
        memory, extent = slot.memory.numpy().data, self.layout.extents[number]
        with self.spans.span(Row.DISK, "write", extent.layer, num_bytes=extent.nbytes):
            await self._transfers.write(extent, memory)
        with self._changed:
            self._table.set_dirty(slot.index, False)
            slot.state = SpillSlotState.READY
            self._advance()
            self._changed.notify_all()
        if WORKING in extent.kinds:
            self._written()
