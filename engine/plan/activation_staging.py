"""Places activations on disk, and sizes the staging buffers in host memory that they pass through. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.spill_layout import BLOCK_BYTES, Extent
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.storage.blob_store import aligned
from megatrain_ray.io.words.atomic_words import WORD_BYTES

# 32 buffers of at most 8 MiB are 256 MiB. The disk transfers a quarter of them at once. The others, three times as
# many, are being filled, or wait for their copy.
MOST_BUFFERS = 32
KIND = "activations"  # the only kind in an extent of activations (Extent.kinds)
# Where activations are small, there are buffers for three of them: one is copied, one is written or read, one waits.
AT_ONCE = 3


class StorageSpan(NamedTuple):
    """Represents a range of one storage's bytes, and its place in a block.

    storage: index among the storages that are offloaded together.
    span: bytes of that storage.
    start: first byte in the block.
    """

    storage: int
    span: ElementRange
    start: int


class ActivationBlock(NamedTuple):
    """Defines the unit of disk transfer: it is written at once, read at once, and has one checksum.

    extent: its place in the file, rounded up to whole pages.
    parts: the storages' bytes that it holds.
    """

    extent: Extent
    parts: tuple[StorageSpan, ...]


class StagingBuffers(NamedTuple):
    """Holds the number and the size of a GPU's staging buffers."""

    number: int
    num_bytes: int  # of each

    @staticmethod
    def of(activations: Sequence[int]) -> StagingBuffers:
        """Return the staging buffers that some activations need.

        activations: bytes of each; at least one.
        """
        largest = max(activations)
        num_bytes = min(BLOCK_BYTES, aligned(largest))
        return StagingBuffers(min(MOST_BUFFERS, AT_ONCE * -(-largest // num_bytes)), num_bytes)

    def num_blocks(self, activations: Sequence[int]) -> int:
        """Return the number of blocks that activations of these sizes (bytes) take on disk."""
        return sum(-(-num_bytes // self.num_bytes) for num_bytes in activations)

    def host_bytes(self, activations: Sequence[int]) -> int:
        """Return the bytes of host memory for the buffers, and for a checksum of each block.

        activations: bytes of each activation on disk.
        """
        return self.number * self.num_bytes + WORD_BYTES * self.num_blocks(activations)


def staging_buffers_of(plan: Plan) -> StagingBuffers:
    return StagingBuffers(plan.disk.num_staging_buffers, plan.disk.staging_buffer_bytes)


def with_staging_buffers(plan: Plan) -> Plan:
    """Return the plan with staging buffers for the activations that it has on disk, if any."""
    if not plan.disk_activations:
        return plan
    number, num_bytes = StagingBuffers.of(plan.disk_activations)
    return replace(plan, disk=replace(plan.disk, num_staging_buffers=number, staging_buffer_bytes=num_bytes))


class DiskAllocator:
    """Allocates places in the file of activations, from its start on, until `clear` frees all of them."""

    def __init__(self, plan: Plan) -> None:
        self._file_bytes = plan.activation_file_bytes
        self._block_bytes = plan.disk.staging_buffer_bytes
        self.clear()

    def clear(self) -> None:
        self._end_byte = self._end_block = 0

    def take(self, layer: int, storage_bytes: Sequence[int]) -> tuple[ActivationBlock, ...]:
        """Allocate blocks for storages of a layer, which lie one after the other.

        storage_bytes: bytes of each storage.
        Raises MegatrainError if the file of the plan is too small.
        """
        blocks = []
        for parts in _cut(storage_bytes, self._block_bytes):
            span = ElementRange(0, parts[-1].start + parts[-1].span.size)
            extent = Extent(layer, span, self._end_byte, aligned(span.size), {KIND: span}, self._end_block)
            self._end_byte += extent.nbytes
            self._end_block += 1
            blocks.append(ActivationBlock(extent, parts))
        if self._end_byte > self._file_bytes:
            raise MegatrainError(
                f"activations take {self._end_byte} bytes of disk, the plan has {self._file_bytes} for them: "
                "micro-batches are larger than planned"
            )
        return tuple(blocks)


def _cut(storage_bytes: Sequence[int], block_bytes: int) -> Iterator[tuple[StorageSpan, ...]]:
    """Yield the parts of each block, for storages that lie one after the other."""
    parts: list[StorageSpan] = []
    room = block_bytes
    for storage, num_bytes in enumerate(storage_bytes):
        start = 0
        while start < num_bytes:
            size = min(room, num_bytes - start)
            parts.append(StorageSpan(storage, ElementRange(start, start + size), block_bytes - room))
            start, room = start + size, room - size
            if not room:
                yield tuple(parts)
                parts, room = [], block_bytes
    if parts:
        yield tuple(parts)
