"""Stores activations on disk and moves them through staging buffers in pinned host memory.

Offloading works block by block: copy a block into a buffer, and write it to the blob once the copy has ended. Reloading
follows the order in which activations are needed: read blocks ahead as long as buffers are free, and copy them as soon
as there is device memory for them. An activation that has begun to leave gets all its buffers before anything is read,
so the two directions do not wait for each other. The event loop of SpillTransfers submits copies and transfers. One
thread for each direction waits for copies.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megatrain_ray.engine.device.deadlines import transfer_deadline_s
from megatrain_ray.engine.device.device import Device, Event
from megatrain_ray.engine.layer_calls.layer_call import bytes_of
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.activation_disk_clock import SimulatedActivationDisk
from megatrain_ray.engine.plan.activation_staging import ActivationBlock, DiskAllocator, staging_buffers_of
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.spill.spill_transfers import Checksums, SpillTransfers
from megatrain_ray.io.storage.blob_store import BlobStore, aligned_block
from megatrain_ray.io.words.atomic_words import WORD_BYTES, Words
from megatrain_ray.spans import Row
from megatrain_ray.virtual_clock import Op, Stage

POISON = 0xFF  # bytes that are a NaN in bf16 and in fp32


class _Copying(NamedTuple):
    """Describes the copies of all blocks of one entry."""

    after: tuple[Event, ...]  # what must come before the copies
    end_s: float  # when they end on the virtual clock


@dataclass(eq=False)
class OffloadedToDisk:
    """Tracks what one layer left of one micro-batch, from its offload until it is reloaded."""

    file: DiskActivations
    op: Op
    storages: list[torch.UntypedStorage]
    blocks: Sequence[ActivationBlock]
    memory: list[torch.Tensor]  # 1-D uint8 view of each storage, as long as copies of it are still to be submitted
    last_out: Event | None = None  # last copy out of the device, once all are submitted
    last_in: Event | None = None  # last copy back, once all are submitted
    num_written: int = 0  # blocks on disk
    num_back: int = 0  # blocks whose copy back is submitted
    copying_in: _Copying | None = None  # set once it has device memory again
    is_written: asyncio.Event = field(default_factory=asyncio.Event)
    is_wanted: asyncio.Event = field(default_factory=asyncio.Event)

    def offloaded(self) -> Event:
        """Wait until all copies out are submitted; return the event after which nothing reads its storages."""
        return self.file.wait(lambda: self.last_out, "d2h", f"{self} to be written")

    def reload(self) -> None:
        """Allocate device memory for it, which is filled as blocks arrive from disk. Idempotent."""
        if self.copying_in is None:
            for storage, tensor_bytes in zip(self.storages, self.sizes, strict=True):
                storage.resize_(tensor_bytes)
            self.file.want(self)

    def reloaded(self) -> Event:
        """Wait until all copies back are submitted; return the event after which its storages have their contents."""
        return self.file.wait(lambda: self.last_in, "h2d", f"{self} to be read")

    def __str__(self) -> str:
        return f"{self.op.name} activations of layer {self.op.layer}"

    @property
    def sizes(self) -> list[int]:
        """Return the bytes of each storage. The last part of each ends with it."""
        ends = {part.storage: part.span.stop for block in self.blocks for part in block.parts}
        return [ends.get(i, 0) for i in range(len(self.storages))]


class DiskActivations:
    """Offloads activations of one plan to a blob on disk and reloads them.

    `send`, `expect`, `want`, `wait` and `clear` are for the compute thread only.
    """

    def __init__(self, plan: Plan, device: Device, store: BlobStore, name: str, *, poison: bool = False) -> None:
        """Allocate the buffers and open the blob.

        store, name: the blob, which has `plan.activation_file_bytes`.
        poison: fill released buffers with NaN.

        Raises MegatrainError if there is no such blob.
        """
        size, count = plan.disk.staging_buffer_bytes, plan.disk.num_staging_buffers
        memory = torch.frombuffer(aligned_block(count * size), dtype=torch.uint8)
        device.pin(memory)
        self._device = device
        self._buffers = [memory[i * size : (i + 1) * size] for i in range(count)]
        self._poison = torch.full_like(self._buffers[0], POISON) if poison else None
        self._free: asyncio.Queue[int] = asyncio.Queue()  # numbers of buffers
        for i in range(count):
            self._free.put_nowait(i)
        self._leaving, self._reading = asyncio.Lock(), asyncio.Lock()  # serialize who takes buffers
        self._places = DiskAllocator(plan)
        account = device.timeline.account
        self._clock = SimulatedActivationDisk(count * size, lambda stage, op, *after: account(stage, op, after))
        self._changed = threading.Condition()
        self._waiters = {stage: ThreadPoolExecutor(1, f"activations {stage.value}") for stage in (Stage.D2H, Stage.H2D)}
        words = staging_buffers_of(plan).num_blocks(plan.disk_activations)
        checksums = Checksums(Words(aligned_block(WORD_BYTES * words), words), 0)
        timeout_s = transfer_deadline_s(plan.total_bytes(Tier.NVME))  # state and gradients may share this disk
        self._transfers = SpillTransfers(store, name, checksums, timeout_s, self._wake)
        self._transfers.open()

    def begin(self) -> None:
        self.clear()
        self._clock.begin()

    def clear(self) -> None:
        """Reset the allocator of disk space. Call only when nothing is offloaded."""
        self._places.clear()

    def send(self, op: Op, storages: list[torch.UntypedStorage]) -> OffloadedToDisk:
        """Offload `storages` to disk, copying them after all work submitted to the compute stream so far."""
        blocks = self._places.take(op.layer, [storage.nbytes() for storage in storages])
        sent = OffloadedToDisk(self, op, storages, blocks, [bytes_of(storage) for storage in storages])
        after = self._device.record()
        copying = _Copying((after,), self._clock.offload(op, after.at_s))
        self._transfers.submit(self._send(sent, copying))
        return sent

    def expect(self, coming: Sequence[OffloadedToDisk]) -> None:
        """Start to read these entries back, in this order. All of them have been sent."""
        self._clock.expect([each.op for each in coming], self._device.timeline.now(Stage.COMPUTE))
        for each in coming:
            self._transfers.submit(self._read(each))

    def want(self, coming: OffloadedToDisk) -> None:
        """Copy blocks of an entry, whose storages have memory again, to the device after all work submitted so far."""
        after = self._device.record()
        assert coming.last_out is not None  # it was offloaded
        coming.memory = [bytes_of(storage) for storage in coming.storages]
        coming.copying_in = _Copying((after, coming.last_out), self._clock.reload(coming.op, after.at_s))
        self._transfers.submit(self._allow_copies(coming))

    def wait(self, last: Callable[[], Event | None], cause: str, what: str) -> Event:
        """Block the compute thread until the last of some copies is submitted, and return its event.

        last: returns the event, or None as long as there is none.
        cause: cause of the exposed time.
        what: the thing waited for, for messages.

        Raises the error that kept a copy from being submitted, or DeadlineError.
        """
        if (event := last()) is not None:
            return event
        with self._device.exposed(cause), self._changed:
            return self._transfers.wait_for(self._changed, last, what)

    def close(self) -> None:
        """Make waiting threads fail and cancel transfers in flight. Idempotent."""
        self._transfers.close()
        for waiter in self._waiters.values():
            waiter.shutdown()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # All methods below run on the event loop of SpillTransfers.

    async def _send(self, sent: OffloadedToDisk, copying: _Copying) -> None:
        async with self._leaving:
            for block in sent.blocks:
                buffer = await self._free.get()
                event = self._copy(Stage.D2H, sent, block, buffer, copying)
                self._transfers.submit(self._write(sent, block, buffer, event))
            sent.memory = []
            sent.last_out = event
        self._wake()

    async def _write(self, sent: OffloadedToDisk, block: ActivationBlock, buffer: int, copied: Event) -> None:
        await self._reached(Stage.D2H, copied)
        with self._span("write", sent, block):
            await self._transfers.write(block.extent, self._block(block, buffer))
        await self._free_buffer(buffer, Stage.D2H, sent.op, copied)
        sent.num_written += 1
        if sent.num_written == len(sent.blocks):
            sent.is_written.set()

    async def _read(self, coming: OffloadedToDisk) -> None:
        async with self._reading:
            await coming.is_written.wait()
            for block in coming.blocks:
                buffer = await self._free.get()
                self._transfers.submit(self._reload_block(coming, block, buffer))

    async def _reload_block(self, coming: OffloadedToDisk, block: ActivationBlock, buffer: int) -> None:
        with self._span("read", coming, block):
            await self._transfers.read(block.extent, self._block(block, buffer))
        await coming.is_wanted.wait()
        assert coming.copying_in is not None
        event = self._copy(Stage.H2D, coming, block, buffer, coming.copying_in)
        coming.num_back += 1
        if coming.num_back == len(coming.blocks):
            coming.memory, coming.storages = [], []  # drop these references: only the tensors hold the memory now
            coming.last_in = event  # copies of a stage end in the order of submission
            self._wake()
        await self._reached(Stage.H2D, event)
        await self._free_buffer(buffer, Stage.H2D, coming.op, event)

    def _span(self, name: str, moved: OffloadedToDisk, block: ActivationBlock) -> AbstractContextManager[None]:
        op = moved.op
        return self._device.spans.span(Row.DISK, f"{name} {op.name}", op.layer, op.micro_batch, block.extent.nbytes)

    async def _allow_copies(self, coming: OffloadedToDisk) -> None:
        coming.is_wanted.set()

    async def _reached(self, stage: Stage, event: Event) -> None:
        """Wait for the event in the stage's one thread: copies of a stage end one after the other."""
        await asyncio.get_running_loop().run_in_executor(self._waiters[stage], event.synchronize)

    def _copy(
        self, stage: Stage, moved: OffloadedToDisk, block: ActivationBlock, buffer: int, copying: _Copying
    ) -> Event:
        pairs = []
        for part in block.parts:
            there = self._buffers[buffer][part.start : part.start + part.span.size]
            here = moved.memory[part.storage][slice(*part.span)]
            pairs.append((there, here) if stage is Stage.D2H else (here, there))
        return self._device.copy_all(stage, pairs, moved.op, copying.after, copying.end_s)

    def _block(self, block: ActivationBlock, buffer: int) -> memoryview:
        return self._buffers[buffer][: block.extent.nbytes].numpy().data

    async def _free_buffer(self, buffer: int, stage: Stage, op: Op, copied: Event) -> None:
        """Return a buffer to the free ones after its last copy, `copied`. Poison it first if that is on."""
        if self._poison is not None:
            pair = self._buffers[buffer], self._poison
            await self._reached(stage, self._device.copy_all(stage, [pair], op, (copied,), copied.at_s))
        self._free.put_nowait(buffer)
