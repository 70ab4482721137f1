"""Counts what spilled gradients, optimizer state and working copies take on disk and in host memory. Pure.

In host memory they take the slots and buffers that they pass through, and a table of checksums.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property
from typing import NamedTuple

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.plan import LayerPlan, Plan
from megatrain_ray.engine.plan.spill_layout import (
    BLOCK_BYTES,
    BLOCK_WORDS,
    SLACK_ELEMENTS,
    SLOT_WORDS,
    kinds_on_disk,
    parts_per_gradient,
)
from megatrain_ray.engine.planner.memory.base_plan import in_flight
from megatrain_ray.engine.spill.spill_transfers import TRANSFERS
from megatrain_ray.io.storage.blob_store import ALIGN_BYTES, aligned
from megatrain_ray.io.storage.packed_store import Packer
from megatrain_ray.io.words.atomic_words import WORD_BYTES

# Elements of a layer's state in one extent (contiguous part of the file); 80 MiB with bf16.
EXTENT_ELEMENTS = 1 << 23
# Slots of a shard for extents in transit between disk and updates: some are read, one is updated, some are written.
# There are few, because the memory that slots take must be gained by spilling more.
STATE_SLOTS = 8
LAYERS_AT_ONCE = 3  # slots if layers are small: one layer is read, one updated, one written
UPLOAD_BUFFERS = 2  # one is read while one is uploaded


def with_spilled(plan: Plan, layers: tuple[LayerPlan, ...], layout: ModelLayout) -> Plan:
    """Return the plan with data of some layers on disk.

    layers: the layers of the plan that results.
    """
    plan = replace(plan, layers=layers, disk=replace(plan.disk, extent_elements=EXTENT_ELEMENTS))
    sizes, item = Sizes.of(plan, layout), plan.gradients.offload_dtype.itemsize
    slab_bytes = plan.gradients.slab_bytes
    if sizes.gradients:
        waiting = [size * item for size in sizes.gradients]
        slab_bytes += max(0, in_flight(waiting) - deferred_bytes(plan, layout)) - sum(waiting)
    num_slots, num_buffers = Spilling(plan).num_slots(sizes.largest), UPLOAD_BUFFERS if plan.weights_on_disk else 0
    return replace(
        plan,
        gradients=replace(plan.gradients, slab_bytes=slab_bytes),
        disk=replace(plan.disk, num_state_slots=num_slots, num_upload_buffers=num_buffers),
    )


def deferred_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Return the slab bytes for gradients that wait on the device until all are complete.

    Gradients on disk can use the same bytes: they have passed through the slab by then.
    """
    return in_flight(
        [layout.host_trained_sizes[i] * plan.gradients.offload_dtype.itemsize for i in plan.deferred_offload_layers]
    )


def slots_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Return the host bytes that spilled data passes through, of all shards together and at most."""
    spilling, sizes = Spilling(plan), Sizes.of(plan, layout)
    return spilling.slots_bytes(sizes.largest, plan.disk.num_state_slots) + spilling.table_bytes(sizes)


def room_in_slots(plan: Plan, layout: ModelLayout) -> int:
    """Return the bytes of state, or of gradients, that all slots together have room for."""
    return plan.disk.num_state_slots * Spilling(plan).slot_room(Sizes.of(plan, layout).largest)


class SpillKind(Enum):
    """Names what optimizer shards have on disk; values are positions in the tuples of sizes in this module."""

    GRADIENT = 0
    STATE = 1
    WEIGHTS = 2

    __hash__ = object.__hash__  # Enum's own is written in Python, and the search calls it all the time


class ByKind(NamedTuple):
    """Holds a number for each SpillKind: bytes, or trained elements of the largest layer."""

    gradients: int = 0
    state: int = 0
    weights: int = 0


def spilled_bytes(plan: Plan, layout: ModelLayout) -> ByKind:
    """Return the bytes on disk, of all shards together and at most."""
    spilling = Spilling(plan)
    return spilling.total(Sizes.of(plan, layout), spilling.disk_bytes)


def upload_buffers_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Return the host bytes that working copies on disk pass through on their way to the device, at most."""
    return Spilling(plan).upload_buffers_bytes(Sizes.of(plan, layout).largest)


class Sizes(NamedTuple):
    """Holds the trained elements of each layer whose gradient, whose state, and whose working copy spills."""

    gradients: Sequence[int]
    state: Sequence[int]
    weights: Sequence[int]

    @staticmethod
    def of(plan: Plan, layout: ModelLayout) -> Sizes:
        spilled = plan.gradients_on_disk, plan.spilled_layers, plan.weights_on_disk
        return Sizes(*([layout.host_trained_sizes[i] for i in layers] for layers in spilled))

    @property
    def largest(self) -> ByKind:
        return ByKind(*(max(sizes, default=0) for sizes in self))


@dataclass(frozen=True)
class Spilling:
    """Counts the bytes of data that passes between disk and memory, of all shards together and at most.

    plan: one whose `extent_elements` are set.
    """

    plan: Plan

    @staticmethod
    def of(plan: Plan) -> Spilling:
        """Return the counter for a plan in which nothing is on disk yet."""
        return Spilling(replace(plan, disk=replace(plan.disk, extent_elements=EXTENT_ELEMENTS)))

    def gained(self, items: Iterable[tuple[SpillKind, int]], deferred_bytes: int) -> Iterator[int]:
        """Yield by how many bytes host memory shrinks with none, one, two, … of these items on disk.

        items: kind and trained elements of each, in the order of spilling.
        deferred_bytes: bytes of the slab that spilled gradients may pass through, too.
        """
        freed, in_slab, passing, waiting, largest = 0, 0, 0, list[int](), [0, 0, 0]
        item_bytes, table_bytes = self._item_bytes, cache(self._table_bytes)
        yield 0
        for kind, size in items:
            if kind is SpillKind.GRADIENT:
                insort(waiting, size * item_bytes.gradients)
                in_slab = max(0, in_flight(waiting) - deferred_bytes)
            freed += size * item_bytes[kind.value] - table_bytes(size)[kind.value]
            if size > largest[kind.value]:
                largest[kind.value] = size
                passing = self._passing(ByKind(*largest))
            yield freed - in_slab - passing

    def gain(self, sizes: Sizes, deferred_bytes: int) -> int:
        """Return by how many bytes host memory shrinks with all of these on disk; `deferred_bytes` as for `gained`."""
        num_bytes = sum(item * sum(layers) for item, layers in zip(self._item_bytes, sizes, strict=True))
        freed = num_bytes - self.table_bytes(sizes)
        in_slab = in_flight([size * self._item_bytes.gradients for size in sizes.gradients])
        return freed - max(0, in_slab - deferred_bytes) - (self._passing(sizes.largest) if any(sizes) else 0)

    def total(self, sizes: Sizes, of_layer: Callable[[int], ByKind]) -> ByKind:
        """Return sums over layers.

        of_layer: computes the numbers of a layer from its trained elements.
        """
        counts = enumerate(map(Counter, sizes))
        return ByKind(*(sum(n * of_layer(size)[kind] for size, n in layers.items()) for kind, layers in counts))

    def _passing(self, largest: ByKind) -> int:
        return self.slots_bytes(largest, self.num_slots(largest)) + self.upload_buffers_bytes(largest)

    def num_slots(self, largest: ByKind) -> int:
        """Return the number of slots of each shard."""
        of_layer = max(self._shard_elements(largest.state), self._shard_elements(largest.gradients) // self._together)
        return min(STATE_SLOTS, max(LAYERS_AT_ONCE, LAYERS_AT_ONCE * of_layer // self.plan.disk.extent_elements))

    def slot_room(self, largest: ByKind) -> int:
        """Return the bytes of data that fit in one slot of each shard, all shards together."""
        precision, most = self.plan.precision, self.plan.disk.extent_elements * self.plan.shards.num_shards
        return max(
            min(most, largest.state) * precision.state_bytes,
            min(most, largest.weights) * precision.element_bytes,
            min(most * self._together, largest.gradients) * self._item_bytes.gradients,
        )

    def slots_bytes(self, largest: ByKind, num_slots: int) -> int:
        """Return the bytes of all slots with the buffers that pack blocks, without the table's words for blocks."""
        plan = self.plan
        size = min(self._shard_elements(largest.state), plan.disk.extent_elements)
        state_bytes = sum(aligned(size * dtype.itemsize) for _, dtype in plan.precision.state_kinds)
        size = min(self._shard_elements(largest.weights), plan.disk.extent_elements)
        kinds = kinds_on_disk(plan.precision, with_weights=True)
        whole_bytes = sum(aligned(size * dtype.itemsize) for _, dtype in kinds)
        size = min(self._shard_elements(largest.gradients), plan.disk.extent_elements * self._together)
        slot_bytes = max(state_bytes, whole_bytes, aligned(size * plan.gradients.offload_dtype.itemsize))
        # Slots and the end of the table are aligned.
        slots = plan.shards.num_shards * (num_slots * (slot_bytes + SLOT_WORDS * WORD_BYTES) + 2 * ALIGN_BYTES)
        return slots + self._packers_bytes(slot_bytes)

    def table_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the table's words for all blocks: the checksum and the stored length of each."""
        return sum(self.total(sizes, self._table_bytes))

    def upload_buffers_bytes(self, largest: ByKind) -> int:
        """Return the bytes of the buffers for working copies with the buffers that unpack blocks."""
        if not largest.weights:
            return 0
        buffer_bytes = self.disk_bytes(largest.weights).weights
        return UPLOAD_BUFFERS * buffer_bytes + self._packers_bytes(buffer_bytes)

    def _packers_bytes(self, most: int) -> int:
        """Return the bytes of packing buffers in a process that moves blocks of every shard's file.

        most: bytes of the largest piece of data that blocks are parts of.
        """
        if not self.plan.disk.packed:
            return 0
        return self.plan.shards.num_shards * TRANSFERS * Packer.num_bytes(min(BLOCK_BYTES, most))

    def disk_bytes(self, size: int) -> ByKind:
        """Return the bytes on disk for a layer of `size` elements, with every piece filled up to whole pages."""
        padding = (self.plan.shards.num_shards * count * ALIGN_BYTES for count in self._pieces(size))
        return ByKind(*(size * item + more for item, more in zip(self._item_bytes, padding, strict=True)))

    def _table_bytes(self, size: int) -> ByKind:
        """Return the bytes of the table's words for all blocks of a layer. The last block of a piece is smaller."""
        pairs = zip(self.disk_bytes(size), self._pieces(size), strict=True)
        blocks = (num_bytes // BLOCK_BYTES + self.plan.shards.num_shards * count for num_bytes, count in pairs)
        return ByKind(*(BLOCK_WORDS * WORD_BYTES * count for count in blocks))

    def _pieces(self, size: int) -> ByKind:
        """Return in how many pieces a shard has the data of a layer of `size` elements, at most."""
        elements, extents = self._shard_elements(size), 1
        if elements > self.plan.disk.extent_elements:
            extents = 1 + elements // (self.plan.disk.extent_elements - SLACK_ELEMENTS)
        return ByKind(-(-extents // self._together), extents * len(self.plan.precision.state_kinds), extents)

    @cached_property
    def _item_bytes(self) -> ByKind:
        precision = self.plan.precision
        return ByKind(
            self.plan.gradients.offload_dtype.itemsize, precision.state_bytes, precision.working_dtype.itemsize
        )

    @property
    def _together(self) -> int:
        return parts_per_gradient(self.plan.precision, self.plan.gradients.offload_dtype)

    def _shard_elements(self, size: int) -> int:
        """Return the most elements that a shard has of a layer of `size` elements."""
        return min(size, -(-size // self.plan.shards.num_shards) + self.plan.shards.cut_elements)
