"""Counts what spilled gradients, optimizer state and working copies take on disk and in host memory. Pure.

In host memory they take the slots and windows that they pass through, and a table of checksums.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
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
WEIGHT_WINDOWS = 2  # one is read while one is uploaded


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
    num_slots, windows = Spilling(plan).num_slots(sizes.largest), WEIGHT_WINDOWS if plan.weights_on_disk else 0
    return replace(
        plan,
        gradients=replace(plan.gradients, slab_bytes=slab_bytes),
        disk=replace(plan.disk, num_state_slots=num_slots, num_upload_buffers=windows),
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
    return spilling.slots_bytes(sizes.largest, plan.disk.num_state_slots) + spilling.sums_bytes(sizes)


def room_in_slots(plan: Plan, layout: ModelLayout) -> int:
    """Return the bytes of state, or of gradients, that all slots together have room for."""
    return plan.disk.num_state_slots * Spilling(plan).slot_room(Sizes.of(plan, layout).largest)


class SpillKind(Enum):
    """Names what optimizer shards have on disk; values are positions in the tuples of sizes in this module."""

    GRADIENT = 0
    STATE = 1
    WEIGHTS = 2

    __hash__ = object.__hash__  # Enum's own is written in Python, and the search calls it all the time


class SpilledBytes(NamedTuple):
    """Holds bytes for each kind of spilled data, of all shards together and at most."""

    gradients: int
    state: int
    weights: int


def spilled_bytes(plan: Plan, layout: ModelLayout) -> SpilledBytes:
    spilling, sizes = Spilling(plan), Sizes.of(plan, layout)
    return SpilledBytes(
        sum(count * spilling.gradient_bytes(size) for size, count in Counter(sizes.gradients).items()),
        sum(count * spilling.state_bytes(size) for size, count in Counter(sizes.state).items()),
        sum(count * spilling.weight_bytes(size) for size, count in Counter(sizes.weights).items()),
    )


def windows_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Return the host bytes that working copies on disk pass through on their way to the device, at most."""
    return Spilling(plan).windows_bytes(Sizes.of(plan, layout).largest)


class Largest(NamedTuple):
    """Holds the elements of the largest layer of each kind of spilled data; 0 if there is none.

    gradient: of layers whose gradient spills.
    state: of layers whose state spills.
    whole: of layers whose working copy spills with the state.
    """

    gradient: int = 0
    state: int = 0
    whole: int = 0

    def with_one(self, kind: SpillKind, size: int) -> Largest:
        return self._replace(**{self._fields[kind.value]: size})


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
    def largest(self) -> Largest:
        return Largest(*(max(sizes, default=0) for sizes in self))


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
        freed, of_gradients, passing, waiting, largest = 0, 0, 0, list[int](), Largest()
        sums_of = cache(self._sums_of_layer)
        precision, item = self.plan.precision, self.plan.gradients.offload_dtype.itemsize
        item_bytes = (item, precision.state_bytes, precision.working_dtype.itemsize)
        yield 0
        for kind, size in items:
            if kind is SpillKind.GRADIENT:
                insort(waiting, size * item)
                of_gradients = -max(0, in_flight(waiting) - deferred_bytes)
            freed += size * item_bytes[kind.value] - sums_of(size)[kind.value]
            if size > largest[kind.value]:
                largest = largest.with_one(kind, size)
                passing = self._passing(largest)
            yield freed + of_gradients - passing

    def gain(self, sizes: Sizes, deferred_bytes: int) -> int:
        """Return by how many bytes host memory shrinks with all of these on disk; `deferred_bytes` as for `gained`."""
        precision, waiting = (
            self.plan.precision,
            [size * self.plan.gradients.offload_dtype.itemsize for size in sizes.gradients],
        )
        freed = sum(waiting) - max(0, in_flight(waiting) - deferred_bytes) + precision.state_bytes * sum(sizes.state)
        freed += precision.working_dtype.itemsize * sum(sizes.weights)
        return freed - self.sums_bytes(sizes) - (self._passing(sizes.largest) if any(sizes) else 0)

    def _passing(self, largest: Largest) -> int:
        return self.slots_bytes(largest, self.num_slots(largest)) + self.windows_bytes(largest)

    def _sums_of_layer(self, size: int) -> SpilledBytes:
        """Return the bytes of the table's words for all blocks of a layer's gradient, state, and working copy."""
        return SpilledBytes(
            self._sums(self.gradient_bytes(size), self._gradients_of_shard(size)),
            self._sums(self.state_bytes(size), self._kinds_of_shard(size)),
            self._sums(self.weight_bytes(size), self._extents_of_shard(size)),
        )

    def num_slots(self, largest: Largest) -> int:
        """Return the number of slots of each shard."""
        of_layer = max(self._of_shard(largest.state), self._of_shard(largest.gradient) // self._together)
        return min(STATE_SLOTS, max(LAYERS_AT_ONCE, LAYERS_AT_ONCE * of_layer // self.plan.disk.extent_elements))

    def slot_room(self, largest: Largest) -> int:
        """Return the bytes of data that fit in one slot of each shard, all shards together."""
        plan = self.plan
        of_state = min(plan.disk.extent_elements * plan.shards.num_shards, largest.state) * plan.precision.state_bytes
        of_whole = min(plan.disk.extent_elements * plan.shards.num_shards, largest.whole) * plan.precision.element_bytes
        in_extent = plan.disk.extent_elements * self._together
        of_gradient = min(in_extent * plan.shards.num_shards, largest.gradient) * plan.gradients.offload_dtype.itemsize
        return max(of_state, of_whole, of_gradient)

    def slots_bytes(self, largest: Largest, num_slots: int) -> int:
        """Return the bytes of all slots with the buffers that pack blocks, without the table's words for blocks."""
        plan = self.plan
        size = min(self._of_shard(largest.state), plan.disk.extent_elements)
        of_state = sum(aligned(size * dtype.itemsize) for _, dtype in plan.precision.state_kinds)
        size = min(self._of_shard(largest.whole), plan.disk.extent_elements)
        kinds = kinds_on_disk(plan.precision, with_weights=True)
        of_whole = sum(aligned(size * dtype.itemsize) for _, dtype in kinds)
        size = min(self._of_shard(largest.gradient), plan.disk.extent_elements * self._together)
        slot_bytes = max(of_state, of_whole, aligned(size * plan.gradients.offload_dtype.itemsize))
        # Slots and the end of the table are aligned.
        slots = plan.shards.num_shards * (num_slots * (slot_bytes + SLOT_WORDS * WORD_BYTES) + 2 * ALIGN_BYTES)
        return slots + self._packers_bytes(slot_bytes)

    def sums_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the table's words for all blocks: the checksum and the stored length of each."""
        of_layer = self._sums_of_layer
        of_gradients = sum(count * of_layer(size).gradients for size, count in Counter(sizes.gradients).items())
        of_state = sum(count * of_layer(size).state for size, count in Counter(sizes.state).items())
        return of_gradients + of_state + sum(n * of_layer(size).weights for size, n in Counter(sizes.weights).items())

    def windows_bytes(self, largest: Largest) -> int:
        """Return the bytes of the windows for working copies with the buffers that unpack blocks."""
        if not largest.whole:
            return 0
        return WEIGHT_WINDOWS * self.weight_bytes(largest.whole) + self._packers_bytes(self.weight_bytes(largest.whole))

    def _packers_bytes(self, most: int) -> int:
        """Return the bytes of packing buffers in a process that moves blocks of every shard's file.

        most: bytes of the largest piece of data that blocks are parts of.
        """
        if not self.plan.disk.packed:
            return 0
        return self.plan.shards.num_shards * TRANSFERS * Packer.num_bytes(min(BLOCK_BYTES, most))

    def gradient_bytes(self, size: int) -> int:
        """Return the bytes on disk of a gradient of `size` elements, with every extent filled up to whole pages."""
        return size * self.plan.gradients.offload_dtype.itemsize + self._filled_up(self._gradients_of_shard(size))

    def state_bytes(self, size: int) -> int:
        """Return the bytes on disk of the state of `size` elements, with every kind filled up to whole pages."""
        precision = self.plan.precision
        return size * precision.state_bytes + self._filled_up(self._kinds_of_shard(size))

    def weight_bytes(self, size: int) -> int:
        """Return the bytes on disk of a working copy of `size` elements, which is one more kind in each extent."""
        return size * self.plan.precision.working_dtype.itemsize + self._filled_up(self._extents_of_shard(size))

    def _filled_up(self, num_of_shard: int) -> int:
        return self.plan.shards.num_shards * num_of_shard * ALIGN_BYTES

    def _sums(self, num_bytes: int, kinds_of_shard: int) -> int:
        """Return the bytes of the table's words for all blocks of `num_bytes` on disk.

        kinds_of_shard: kinds in all extents of a shard, whose last blocks are smaller than the others.
        """
        return BLOCK_WORDS * WORD_BYTES * (num_bytes // BLOCK_BYTES + self.plan.shards.num_shards * kinds_of_shard)

    def _extents_of_shard(self, size: int) -> int:
        """Return the most extents that a shard has for the state of a layer of `size` elements."""
        of_shard = self._of_shard(size)
        if of_shard <= self.plan.disk.extent_elements:
            return 1
        return 1 + of_shard // (self.plan.disk.extent_elements - SLACK_ELEMENTS)

    def _kinds_of_shard(self, size: int) -> int:
        """Return the number of kinds of state in all of these extents."""
        return self._extents_of_shard(size) * len(self.plan.precision.state_kinds)

    def _gradients_of_shard(self, size: int) -> int:
        """Return the most extents that a shard has for the gradient of a layer of `size` elements."""
        return -(-self._extents_of_shard(size) // self._together)

    @property
    def _together(self) -> int:
        return parts_per_gradient(self.plan.precision, self.plan.gradients.offload_dtype)

    def _of_shard(self, size: int) -> int:
        """Return the most elements that a shard has of a layer of `size` elements."""
        return min(size, -(-size // self.plan.shards.num_shards) + self.plan.shards.cut_elements)
