"""What of layers is on disk, activations, gradients that wait for their update, optimizer state and working copies: as
little as host memory needs. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatrain_ray.engine.activation_moves import Activations, away, num_bytes
from megatrain_ray.engine.activation_space import Windows
from megatrain_ray.engine.layout import ModelLayout
from megatrain_ray.engine.model import LayerKind, ModelStructure
from megatrain_ray.engine.plan import LayerPlan, Plan, Tier, UpdateOrder
from megatrain_ray.engine.plan_gradients import in_flight
from megatrain_ray.engine.spill_layout import (
    BLOCK_BYTES,
    BLOCK_WORDS,
    SLACK_ELEMENTS,
    SLOT_WORDS,
    kinds_on_disk,
    parts_per_gradient,
)
from megatrain_ray.engine.spill_transfers import TRANSFERS
from megatrain_ray.io.blob_store import ALIGN_BYTES, aligned
from megatrain_ray.io.packed_store import Packer
from megatrain_ray.io.words import WORD_BYTES

# Of a layer's state on disk; 80 MiB with bf16.
EXTENT_ELEMENTS = 1 << 23
# Of extents on their way between disk and updates: some are read, one is updated, some are written. What slots take
# must spill, so there are few.
STATE_SLOTS = 8
LAYERS_AT_ONCE = 3  # at most, where layers are small: one is read, one updated, one written
WEIGHT_WINDOWS = 2  # one is read, one uploaded


class OnDisk(NamedTuple):
    """Layers of which something is on disk."""

    gradients: frozenset[int] = frozenset()
    state: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    boundaries: frozenset[int] = frozenset()  # what enters them
    kept: frozenset[int] = frozenset()  # what their forward keeps

    @property
    def of_shards(self) -> bool:
        """Whether something is what optimizer shards have there."""
        return bool(self.gradients or self.state)


@dataclass(frozen=True)
class SpillOrder:
    """What of a plan can spill, what spills first before the rest: activations of these layers, gradients, then state,
    then working copies of blocks. `gained`: by how many bytes of host memory it takes less with none, one, two, … of
    all that on disk."""

    activations: tuple[tuple[Activations, int], ...]
    gradients: tuple[int, ...]
    state: tuple[int, ...]
    weights: tuple[int, ...]
    gained: tuple[int, ...]

    @staticmethod
    def of(plan: Plan, structure: ModelStructure, layout: ModelLayout, *, activations: bool) -> SpillOrder:
        """A byte of a gradient or of state costs two that move a step, of activations in every sweep. These have the
        time of all that is computed between a layer's forward and its backward, the first layers the most. A gradient's
        are written in the backward, when else nothing wants the disk; state comes and goes with the updates alone,
        which the next forward waits for. A byte of a working copy comes and goes with the state, and comes again for
        every upload. `activations`: whether these may spill.

        Blocks from the last on: the next forward comes to them last, so there is most time until their update must
        be done. Then the ends, which may be many times as large, and slots with them. Not what Muon trains something
        of: the GPU worker reads its momenta. Working copies of blocks of which nothing is frozen alone. `plan`: in
        which nothing spills yet."""
        able = [i for i in plan.host_layers if layout.trained_sizes[i] and not layout.layers[i].num_muon]
        order = tuple(sorted(able, key=lambda i: (structure.layers[i].kind is not LayerKind.BLOCK, -i)))
        is_block = [layer.kind is LayerKind.BLOCK for layer in structure.layers]
        weights = tuple(i for i in order if is_block[i] and not layout.layers[i].frozen.size)
        waits_in_slab = plan.update_order is UpdateOrder.FORWARD and plan.sums is Tier.HBM
        waiting = tuple(i for i in order if waits_in_slab and plan.layers[i].gradients is Tier.HOST)
        spilling = _Spilling(replace(plan, extent_elements=EXTENT_ELEMENTS))
        of_gradients, of_state, of_weights = (
            [layout.trained_sizes[i] for i in layers] for layers in (waiting, order, weights)
        )
        moving = tuple((kind, i) for i, layer in enumerate(plan.layers) for kind in away(layer)) if activations else ()
        by_moving = [*_gained(plan, [num_bytes(plan.layers[i], kind) for kind, i in moving])]
        gained = spilling.gained(of_gradients, of_state, of_weights, _late_bytes(plan, layout))
        of_all = (*by_moving[:-1], *(by_moving[-1] + more for more in gained))
        return SpillOrder(moving, waiting, order, weights, of_all)

    def first(self, missing: int) -> OnDisk:
        """As little as makes up for so many bytes; what frees the most, which may be nothing, where it is not
        enough."""
        enough = (count for count, gained in enumerate(self.gained) if gained >= missing)
        count = next(enough, self.gained.index(max(self.gained)))
        of_gradients = max(0, count - len(self.activations))
        of_state = max(0, of_gradients - len(self.gradients))
        of_weights = max(0, of_state - len(self.state))
        moving = {k: frozenset(i for kind, i in self.activations[:count] if kind is k) for k in Activations}
        return OnDisk(
            frozenset(self.gradients[:of_gradients]),
            frozenset(self.state[:of_state]),
            frozenset(self.weights[:of_weights]),
            moving[Activations.BOUNDARY],
            moving[Activations.KEPT],
        )


def _gained(plan: Plan, activations: Sequence[int]) -> Iterator[int]:
    """By how much host memory is less with none, one, two, … of these on disk: bytes of one micro-batch of each."""
    yield 0
    for count in range(1, len(activations) + 1):
        on_disk = plan.num_live_micro_batches * list(activations[:count])
        yield sum(on_disk) - Windows.of(on_disk).memory_bytes(on_disk)


def with_spilled(plan: Plan, layers: tuple[LayerPlan, ...], layout: ModelLayout) -> Plan:
    """The plan with something of some layers on disk. `layers`: its layers then."""
    plan = replace(plan, layers=layers, extent_elements=EXTENT_ELEMENTS)
    sizes, item = _Sizes.of(plan, layout), plan.wire_dtype.itemsize
    slab_bytes = plan.slab_bytes
    if sizes.gradients:
        waiting = [size * item for size in sizes.gradients]
        slab_bytes += max(0, in_flight(waiting) - _late_bytes(plan, layout)) - sum(waiting)
    num_slots, windows = _Spilling(plan).num_slots(sizes.largest), WEIGHT_WINDOWS if plan.weights_on_disk else 0
    return replace(plan, slab_bytes=slab_bytes, state_slots=num_slots, weight_windows=windows)


def _late_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Of the slab, for gradients that wait on the device until all are complete: those on disk have passed by then."""
    return in_flight([layout.trained_sizes[i] * plan.wire_dtype.itemsize for i in plan.departing_layers])


def slots_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Host memory that what spills passes through, of all shards together and at most."""
    spilling, sizes = _Spilling(plan), _Sizes.of(plan, layout)
    return spilling.slots_bytes(sizes.largest, plan.state_slots) + spilling.sums_bytes(sizes)


def room_in_slots(plan: Plan, layout: ModelLayout) -> int:
    """Bytes of state, or of gradients, that all slots together have room for."""
    largest = _Sizes.of(plan, layout).largest
    of_state = min(plan.extent_elements * plan.num_shards, largest.state) * plan.precision.state_bytes
    of_whole = min(plan.extent_elements * plan.num_shards, largest.whole) * plan.precision.element_bytes
    in_extent = plan.extent_elements * parts_per_gradient(plan.precision, plan.wire_dtype)
    of_gradient = min(in_extent * plan.num_shards, largest.gradient) * plan.wire_dtype.itemsize
    return plan.state_slots * max(of_state, of_whole, of_gradient)


class SpilledBytes(NamedTuple):
    """On disk, of all shards together and at most."""

    gradients: int
    state: int
    weights: int


def spilled_bytes(plan: Plan, layout: ModelLayout) -> SpilledBytes:
    spilling, sizes = _Spilling(plan), _Sizes.of(plan, layout)
    return SpilledBytes(
        sum(map(spilling.gradient_bytes, sizes.gradients)),
        sum(map(spilling.state_bytes, sizes.state)),
        sum(map(spilling.weight_bytes, sizes.weights)),
    )


def windows_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Host memory that working copies on disk pass through on their way to the device, at most."""
    return _Spilling(plan).windows_bytes(_Sizes.of(plan, layout).largest)


def beyond_disk(plan: Plan) -> int:
    """Bytes beyond what may be on disk."""
    limit = plan.spill_limit_bytes
    return max(0, plan.total_bytes(Tier.NVME) - (0 if limit is None else limit))


class _Largest(NamedTuple):
    """Elements of the largest layer whose gradient, whose state, and whose working copy with it spills; 0 where there
    is none."""

    gradient: int = 0
    state: int = 0
    whole: int = 0


class _Sizes(NamedTuple):
    """Elements of what is trained of every layer whose gradient, whose state, and whose working copy spills."""

    gradients: Sequence[int]
    state: Sequence[int]
    weights: Sequence[int]

    @staticmethod
    def of(plan: Plan, layout: ModelLayout) -> _Sizes:
        spilled = plan.stored_layers, plan.spilled_layers, plan.weights_on_disk
        return _Sizes(*([layout.trained_sizes[i] for i in layers] for layers in spilled))

    @property
    def largest(self) -> _Largest:
        return _Largest(*(max(sizes, default=0) for sizes in self))


@dataclass(frozen=True)
class _Spilling:
    """Bytes of what passes between disk and memory, of all shards together and at most. `plan`: with its extents."""

    plan: Plan

    def gained(
        self, gradients: Sequence[int], state: Sequence[int], weights: Sequence[int], late_bytes: int
    ) -> Iterator[int]:
        """By how much host memory is less with none, one, two, … of these gradients on disk, then of this state, then
        of these working copies: elements of each. `late_bytes`: of the slab, that gradients may pass through."""
        freed, sums, waiting, largest = 0, 0, list[int](), _Largest()
        yield 0
        for size in gradients:
            insort(waiting, size * self.plan.wire_dtype.itemsize)
            freed = sum(waiting) - max(0, in_flight(waiting) - late_bytes)
            sums += self._sums(self.gradient_bytes(size), self._gradients_of_shard(size))
            largest = largest._replace(gradient=max(size, largest.gradient))
            yield freed - sums - self.slots_bytes(largest, self.num_slots(largest))
        for size in state:
            freed += size * self.plan.precision.state_bytes
            sums += self._sums(self.state_bytes(size), self._kinds_of_shard(size))
            largest = largest._replace(state=max(size, largest.state))
            yield freed - sums - self.slots_bytes(largest, self.num_slots(largest))
        for size in weights:
            freed += size * self.plan.precision.working_dtype.itemsize
            sums += self._sums(self.weight_bytes(size), self._extents_of_shard(size))
            largest = largest._replace(whole=max(size, largest.whole))
            passing = self.slots_bytes(largest, self.num_slots(largest)) + self.windows_bytes(largest)
            yield freed - sums - passing

    def num_slots(self, largest: _Largest) -> int:
        """Of each shard."""
        of_layer = max(self._of_shard(largest.state), self._of_shard(largest.gradient) // self._together)
        return min(STATE_SLOTS, max(LAYERS_AT_ONCE, LAYERS_AT_ONCE * of_layer // self.plan.extent_elements))

    def slots_bytes(self, largest: _Largest, num_slots: int) -> int:
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

    def sums_bytes(self, sizes: _Sizes) -> int:
        """Of the words of all blocks."""
        of_gradients = (self._sums(self.gradient_bytes(x), self._gradients_of_shard(x)) for x in sizes.gradients)
        of_weights = (self._sums(self.weight_bytes(x), self._extents_of_shard(x)) for x in sizes.weights)
        of_state = (self._sums(self.state_bytes(x), self._kinds_of_shard(x)) for x in sizes.state)
        return sum(of_gradients) + sum(of_state) + sum(of_weights)

    def windows_bytes(self, largest: _Largest) -> int:
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
