"""Where activations lie on disk, and the windows that they pass through. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatrain_ray.engine.layout.flat_layout import Span
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.activation_moves import away
from megatrain_ray.engine.plan.activation_moves import num_bytes as bytes_of
from megatrain_ray.engine.plan.plan import LayerPlan, Plan
from megatrain_ray.engine.plan.spill_layout import BLOCK_BYTES, Extent
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.storage.blob_store import ALIGN_BYTES, aligned
from megatrain_ray.io.words.atomic_words import WORD_BYTES

# 256 MiB, three times what is on its way to the disk or from it: the others are filled, or wait for their copy.
NUM_WINDOWS = 32
KIND = "activations"  # of their extents
AT_ONCE = 3  # activations of a layer, where these are small: one is copied, one is written or read, one waits


class Part(NamedTuple):
    """Bytes `span` of storage number `storage`, in their block from `start` on."""

    storage: int
    span: Span
    start: int


class Block(NamedTuple):
    """What is written at once, and read at once, and has one checksum. `extent`: itself, as large as whole pages."""

    extent: Extent
    parts: tuple[Part, ...]


class Windows(NamedTuple):
    """In memory of the host or of the device."""

    number: int
    num_bytes: int  # of each

    @staticmethod
    def of(activations: Sequence[int]) -> Windows:
        """As many as these need: bytes of each, at least one."""
        largest = max(activations)
        num_bytes = min(BLOCK_BYTES, aligned(largest))
        return Windows(min(NUM_WINDOWS, AT_ONCE * -(-largest // num_bytes)), num_bytes)

    def num_blocks(self, activations: Sequence[int]) -> int:
        """On disk."""
        return sum(-(-num_bytes // self.num_bytes) for num_bytes in activations)

    def host_bytes(self, activations: Sequence[int]) -> int:
        """Of windows in host memory, and of a checksum of each block."""
        return self.number * self.num_bytes + self.beside_device_bytes(activations)

    def beside_device_bytes(self, activations: Sequence[int]) -> int:
        """In host memory where windows are on the device: of checksums."""
        return WORD_BYTES * self.num_blocks(activations)

    @property
    def device_bytes(self) -> int:
        """Of windows there, which begin at a page."""
        return self.number * self.num_bytes + ALIGN_BYTES


def windows_of(plan: Plan) -> Windows:
    return Windows(plan.num_windows, plan.window_bytes)


def with_windows(plan: Plan, tier: Tier) -> Plan:
    """For the activations that are on disk. `tier`: where windows are."""
    if not plan.disk_activations:
        return plan
    windows = Windows.of(plan.disk_activations)
    return replace(plan, num_windows=windows.number, window_bytes=windows.num_bytes, windows=tier)


def most_windows_bytes(layers: Sequence[LayerPlan]) -> int:
    """Of the device, for windows there, at most: with all on disk that may be. `layers`: of a plan with nothing
    there."""
    moving = [bytes_of(layer, kind) for layer in layers for kind in away(layer)]
    return Windows.of(moving).device_bytes if moving else 0


class Places:
    """Places on disk, from its start on until all of it is free again."""

    def __init__(self, plan: Plan) -> None:
        self._file_bytes = plan.activation_file_bytes
        self._block_bytes = plan.window_bytes
        self.clear()

    def clear(self) -> None:
        self._end_byte = self._end_block = 0

    def take(self, layer: int, storage_bytes: Sequence[int]) -> tuple[Block, ...]:
        """For storages of a layer, one behind the other. Raises MegatrainError beyond what the plan has."""
        blocks = []
        for parts in _cut(storage_bytes, self._block_bytes):
            span = Span(0, parts[-1].start + parts[-1].span.size)
            extent = Extent(layer, span, self._end_byte, aligned(span.size), {KIND: span}, self._end_block)
            self._end_byte += extent.nbytes
            self._end_block += 1
            blocks.append(Block(extent, parts))
        if self._end_byte > self._file_bytes:
            raise MegatrainError(
                f"activations take {self._end_byte} bytes of disk, the plan has {self._file_bytes} for them: "
                "micro-batches are larger than planned"
            )
        return tuple(blocks)


def _cut(storage_bytes: Sequence[int], block_bytes: int) -> Iterator[tuple[Part, ...]]:
    """Storages one behind the other, in blocks."""
    parts: list[Part] = []
    room = block_bytes
    for storage, num_bytes in enumerate(storage_bytes):
        start = 0
        while start < num_bytes:
            size = min(room, num_bytes - start)
            parts.append(Part(storage, Span(start, start + size), block_bytes - room))
            start, room = start + size, room - size
            if not room:
                yield tuple(parts)
                parts, room = [], block_bytes
    if parts:
        yield tuple(parts)
