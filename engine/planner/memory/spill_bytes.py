"""What gradients, optimizer state and working copies on disk take there, and in host memory, which they pass through.
Pure."""

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
from megatrain_ray.engine.planner.memory.gradient_placement import in_flight
from megatrain_ray.engine.spill.spill_transfers import TRANSFERS
from megatrain_ray.io.storage.blob_store import ALIGN_BYTES, aligned
from megatrain_ray.io.storage.packed_store import Packer
from megatrain_ray.io.words.atomic_words import WORD_BYTES

# Of a layer's state on disk; 80 MiB with bf16.
EXTENT_ELEMENTS = 1 << 23
# Of extents on their way between disk and updates: some are read, one is updated, some are written. What slots take
# must spill, so there are few.
STATE_SLOTS = 8
LAYERS_AT_ONCE = 3  # at most, where layers are small: one is read, one updated, one written
WEIGHT_WINDOWS = 2  # one is read, one uploaded


def with_spilled(plan: Plan, layers: tuple[LayerPlan, ...], layout: ModelLayout) -> Plan:
    """The plan with something of some layers on disk. `layers`: its layers then."""
    plan = replace(plan, layers=layers, extent_elements=EXTENT_ELEMENTS)
    sizes, item = Sizes.of(plan, layout), plan.wire_dtype.itemsize
    slab_bytes = plan.slab_bytes
    if sizes.gradients:
        waiting = [size * item for size in sizes.gradients]
        slab_bytes += max(0, in_flight(waiting) - late_bytes(plan, layout)) - sum(waiting)
    num_slots, windows = Spilling(plan).num_slots(sizes.largest), WEIGHT_WINDOWS if plan.weights_on_disk else 0
    return replace(plan, slab_bytes=slab_bytes, state_slots=num_slots, weight_windows=windows)


def late_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Of the slab, for gradients that wait on the device until all are complete: those on disk have passed by then."""
    return in_flight([layout.host_trained_sizes[i] * plan.wire_dtype.itemsize for i in plan.departing_layers])


def slots_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Host memory that what spills passes through, of all shards together and at most."""
    spilling, sizes = Spilling(plan), Sizes.of(plan, layout)
    return spilling.slots_bytes(sizes.largest, plan.state_slots) + spilling.sums_bytes(sizes)


def room_in_slots(plan: Plan, layout: ModelLayout) -> int:
    """Bytes of state, or of gradients, that all slots together have room for."""
    return plan.state_slots * Spilling(plan).slot_room(Sizes.of(plan, layout).largest)


def most_room_in_slots(plan: Plan, layout: ModelLayout) -> int:
    """The same at most, whatever of a plan with nothing on disk goes there."""
    spilling, largest = Spilling.of(plan), Largest(*[max(layout.host_trained_sizes)] * 3)
    return spilling.num_slots(largest) * spilling.slot_room(largest)


class Kind(Enum):
    """Of what optimizer shards have on disk; the order is that of sizes here."""

    GRADIENT = 0
    STATE = 1
    WEIGHTS = 2

    __hash__ = object.__hash__  # Enum's own is Python, and the search asks for it all the time


class SpilledBytes(NamedTuple):
    """On disk, of all shards together and at most."""

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
    """Host memory that working copies on disk pass through on their way to the device, at most."""
    return Spilling(plan).windows_bytes(Sizes.of(plan, layout).largest)


class Largest(NamedTuple):
    """Elements of the largest layer whose gradient, whose state, and whose working copy with it spills; 0 where there
    is none."""

    gradient: int = 0
    state: int = 0
    whole: int = 0

    def with_one(self, kind: Kind, size: int) -> Largest:
        return self._replace(**{self._fields[kind.value]: size})


class Sizes(NamedTuple):
    """Elements of what is trained of every layer whose gradient, whose state, and whose working copy spills."""

    gradients: Sequence[int]
    state: Sequence[int]
    weights: Sequence[int]

    @staticmethod
    def of(plan: Plan, layout: ModelLayout) -> Sizes:
        spilled = plan.stored_layers, plan.spilled_layers, plan.weights_on_disk
        return Sizes(*([layout.host_trained_sizes[i] for i in layers] for layers in spilled))

    @property
    def largest(self) -> Largest:
        return Largest(*(max(sizes, default=0) for sizes in self))


@dataclass(frozen=True)
class Spilling:
    """Bytes of what passes between disk and memory, of all shards together and at most. `plan`: with its extents."""

    plan: Plan

    @staticmethod
    def of(plan: Plan) -> Spilling:
        """Of a plan in which nothing is on disk yet."""
        return Spilling(replace(plan, extent_elements=EXTENT_ELEMENTS))

    def gained(self, items: Iterable[tuple[Kind, int]], late_bytes: int) -> Iterator[int]:
        """By how much host memory is less with none, one, two, … of these on disk: elements of each. `late_bytes`: of
        the slab, that gradients may pass through."""
        freed, of_gradients, passing, waiting, largest = 0, 0, 0, list[int](), Largest()
        sums_of = cache(self._sums_of_layer)
        precision, item = self.plan.precision, self.plan.wire_dtype.itemsize
        item_bytes = (item, precision.state_bytes, precision.working_dtype.itemsize)
        yield 0
        for kind, size in items:
            if kind is Kind.GRADIENT:
                insort(waiting, size * item)
                of_gradients = -max(0, in_flight(waiting) - late_bytes)
            freed += size * item_bytes[kind.value] - sums_of(size)[kind.value]
            if size > largest[kind.value]:
                largest = largest.with_one(kind, size)
                passing = self._passing(largest)
            yield freed + of_gradients - passing

    def gain(self, sizes: Sizes, late_bytes: int) -> int:
        """The same with all of these on disk."""
        precision, waiting = self.plan.precision, [size * self.plan.wire_dtype.itemsize for size in sizes.gradients]
        freed = sum(waiting) - max(0, in_flight(waiting) - late_bytes) + precision.state_bytes * sum(sizes.state)
        freed += precision.working_dtype.itemsize * sum(sizes.weights)
        return freed - self.sums_bytes(sizes) - (self._passing(sizes.largest) if any(sizes) else 0)

    def _passing(self, largest: Largest) -> int:
        return self.slots_bytes(largest, self.num_slots(largest)) + self.windows_bytes(largest)

    def _sums_of_layer(self, size: int) -> SpilledBytes:
        """Of the words of all blocks of a layer's gradient, state, and working copy."""
        return SpilledBytes(
            self._sums(self.gradient_bytes(size), self._gradients_of_shard(size)),
            self._sums(self.state_bytes(size), self._kinds_of_shard(size)),
            self._sums(self.weight_bytes(size), self._extents_of_shard(size)),
        )

    def num_slots(self, largest: Largest) -> int:
        """Of each shard."""
        of_layer = max(self._of_shard(largest.state), self._of_shard(largest.gradient) // self._together)
        return min(STATE_SLOTS, max(LAYERS_AT_ONCE, LAYERS_AT_ONCE * of_layer // self.plan.extent_elements))

    def slot_room(self, largest: Largest) -> int:
        """Of a slot of each shard, bytes of what is there."""
        plan = self.plan
        of_state = min(plan.extent_elements * plan.num_shards, largest.state) * plan.precision.state_bytes
        of_whole = min(plan.extent_elements * plan.num_shards, largest.whole) * plan.precision.element_bytes
        in_extent = plan.extent_elements * self._together
        of_gradient = min(in_extent * plan.num_shards, largest.gradient) * plan.wire_dtype.itemsize
        return max(of_state, of_whole, of_gradient)

    def slots_bytes(self, largest: Largest, num_slots: int) -> int:
        """With what packs blocks, without the blocks' words."""
        plan = self.plan
        size = min(self._of_shard(largest.state), plan.extent_elements)
        of_state = sum(aligned(size * dtype.itemsize) for _, dtype in plan.precision.state_kinds)
        size = min(self._of_shard(largest.whole), plan.extent_elements)
        kinds = kinds_on_disk(plan.precision, with_weights=True)
        of_whole = sum(aligned(size * dtype.itemsize) for _, dtype in kinds)
        size = min(self._of_shard(largest.gradient), plan.extent_elements * self._together)
        slot_bytes = max(of_state, of_whole, aligned(size * plan.wire_dtype.itemsize))
        # Slots and the end of the table are aligned.
        slots = plan.num_shards * (num_slots * (slot_bytes + SLOT_WORDS * WORD_BYTES) + 2 * ALIGN_BYTES)
        return slots + self._packers_bytes(slot_bytes)

    def sums_bytes(self, sizes: Sizes) -> int:
        """Of the words of all blocks."""
        of_layer = self._sums_of_layer
        of_gradients = sum(count * of_layer(size).gradients for size, count in Counter(sizes.gradients).items())
        of_state = sum(count * of_layer(size).state for size, count in Counter(sizes.state).items())
        return of_gradients + of_state + sum(n * of_layer(size).weights for size, n in Counter(sizes.weights).items())

    def windows_bytes(self, largest: Largest) -> int:
        """With what unpacks blocks."""
        if not largest.whole:
            return 0
        return WEIGHT_WINDOWS * self.weight_bytes(largest.whole) + self._packers_bytes(self.weight_bytes(largest.whole))

    def _packers_bytes(self, most: int) -> int:
        """Of a process that moves blocks of every shard's file; `most`: bytes of what they are parts of."""
        if not self.plan.disk_packed:
            return 0
        return self.plan.num_shards * TRANSFERS * Packer.num_bytes(min(BLOCK_BYTES, most))

    def gradient_bytes(self, size: int) -> int:
        """On disk, of the gradient of so many elements: what fills every extent up to whole pages included."""
        return size * self.plan.wire_dtype.itemsize + self._filled_up(self._gradients_of_shard(size))

    def state_bytes(self, size: int) -> int:
        """The same of the state, of which every kind is filled up."""
        precision = self.plan.precision
        return size * precision.state_bytes + self._filled_up(self._kinds_of_shard(size))

    def weight_bytes(self, size: int) -> int:
        """The same of the working copy, which is one more kind."""
        return size * self.plan.precision.working_dtype.itemsize + self._filled_up(self._extents_of_shard(size))

    def _filled_up(self, num_of_shard: int) -> int:
        return self.plan.num_shards * num_of_shard * ALIGN_BYTES

    def _sums(self, num_bytes: int, kinds_of_shard: int) -> int:
        """Of the words of all blocks of so many bytes on disk: the last one of a kind in an extent is smaller."""
        return BLOCK_WORDS * WORD_BYTES * (num_bytes // BLOCK_BYTES + self.plan.num_shards * kinds_of_shard)

    def _extents_of_shard(self, size: int) -> int:
        """With the state of a layer of so many elements, at most."""
        of_shard = self._of_shard(size)
        if of_shard <= self.plan.extent_elements:
            return 1
        return 1 + of_shard // (self.plan.extent_elements - SLACK_ELEMENTS)

    def _kinds_of_shard(self, size: int) -> int:
        """Of state, in all of these extents."""
        return self._extents_of_shard(size) * len(self.plan.precision.state_kinds)

    def _gradients_of_shard(self, size: int) -> int:
        """The same with its gradient."""
        return -(-self._extents_of_shard(size) // self._together)

    @property
    def _together(self) -> int:
        return parts_per_gradient(self.plan.precision, self.plan.wire_dtype)

    def _of_shard(self, size: int) -> int:
        """Elements of a shard's part of a layer of so many, at most."""
        return min(size, -(-size // self.plan.num_shards) + self.plan.shard_cut_elements)
