"""Chooses what data of layers is spilled to disk if host memory is too small for all of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import NamedTuple

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.engine.plan.activation_moves import Activations, away, num_bytes
from megatrain_ray.engine.plan.activation_staging import StagingBuffers
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_groups import UpdateOrder
from megatrain_ray.engine.planner.memory.spill_bytes import Sizes, Spilling, SpillKind, deferred_bytes
from megatrain_ray.engine.planner.request import SpillFirst
from megatrain_ray.io.words.atomic_words import WORD_BYTES


class LayersOnDisk(NamedTuple):
    """Lists the layers of which something is on disk, by kind of data."""

    gradients: frozenset[int] = frozenset()
    state: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    boundaries: frozenset[int] = frozenset()  # layers whose input is there
    kept: frozenset[int] = frozenset()  # layers whose kept activations are there

    @property
    def of_shards(self) -> bool:
        """Return whether optimizer shards have something on disk."""
        return bool(self.gradients or self.state)


NOTHING = LayersOnDisk()


class Most(NamedTuple):
    """Says what spilling can do at most.

    num_bytes: bytes on disk with everything there that may be.
    gain: the most bytes of host memory that spilling can free.
    """

    num_bytes: int
    gain: int


Item = tuple[SpillKind | Activations, int]  # what is spilled, and of which layer
FIELDS: dict[SpillKind | Activations, str] = {
    SpillKind.GRADIENT: "gradients", SpillKind.STATE: "state", SpillKind.WEIGHTS: "weights",
    Activations.BOUNDARY: "boundaries", Activations.KEPT: "kept",
}  # fmt: skip
ORDERS = SpillFirst.GRADIENTS, SpillFirst.STATE, SpillFirst.ENDS, SpillFirst.FRONT
FEWER = 0.98  # another order replaces the first of these if it needs less than this share of its bytes on disk


@dataclass(frozen=True)
class Spillable:
    """Finds what of a plan can be spilled to disk, and how much host memory that frees.

    Layers of which Muon trains something are not spilled, because the GPU worker reads their momenta. Working copies
    are spilled only of blocks with nothing frozen and no wide copies, and only with one GPU: several would each read
    all of them.

    plan: one in which nothing is on disk.
    activations: whether activations may be spilled.
    """

    plan: Plan
    structure: ModelStructure
    layout: ModelLayout
    activations: bool

    def choice(self, missing: int, first: SpillFirst) -> LayersOnDisk:
        """Return the smallest choice that frees `missing` bytes of host memory.

        If nothing frees that much, return what frees the most, which may be nothing.
        """
        if first is not SpillFirst.LEAST:
            return self._choice(missing, first)
        usual = self._choice(missing, ORDERS[0])
        beyond = self.gain(usual) - missing
        # Activations come first in every order, so all orders agree if these are enough. A byte on disk frees a byte of
        # host memory or a little less, so another order can save about `beyond` bytes on disk at most.
        if beyond >= 0 and (not any(usual[:3]) or beyond < (1 - FEWER) * self.num_bytes(usual)):
            return usual
        others = [self._choice(missing, order) for order in ORDERS[1:]]
        least = min((other for other in others if self.gain(other) >= missing), key=self.num_bytes, default=usual)
        return least if beyond < 0 or self.num_bytes(least) < FEWER * self.num_bytes(usual) else usual

    @cached_property
    def most(self) -> Most:
        everything = _on_disk(self.order(ORDERS[0]))
        # Slots and buffers may take more host memory than spilling the last kinds frees.
        without_weights = everything._replace(weights=frozenset())
        activations = without_weights._replace(gradients=frozenset(), state=frozenset())
        gain = max(map(self.gain, (everything, without_weights, activations)))
        return Most(self.num_bytes(everything), gain)

    def order(self, first: SpillFirst) -> list[Item]:
        """Return everything that can be spilled, in the order of spilling: activations before data of the shards."""
        return [*self._moving, *self._shard_items(first)]

    def _shard_items(self, first: SpillFirst) -> list[tuple[SpillKind, int]]:
        """Return the data of optimizer shards that can be spilled, in the order of spilling.

        Costs decide the order. A byte of a gradient or of state moves twice per step, a byte of activations twice per
        sweep. Activations can move during all that is computed between a layer's forward and its backward, which is the
        most for the first layers. Gradients are written in the backward, when nothing else needs the disk. State is
        read and written only with the updates, which the next forward waits for. A byte of a working copy moves with
        the state, and is read once more for every upload.

        Blocks are taken from the last to the first: the next forward reaches the last ones last, so there is the most
        time for their updates. Then follow embedding and head, which may be many times as large, and slots with them.
        """
        is_block, layers = [layer.kind is LayerKind.BLOCK for layer in self.structure.layers], self.layout.layers
        able = [i for i in self.plan.host_layers if self.layout.host_trained_sizes[i] and not layers[i].num_muon]
        ranks: dict[SpillFirst, Callable[[int], tuple[bool, int]]] = {
            SpillFirst.FRONT: lambda i: (False, i), SpillFirst.ENDS: lambda i: (is_block[i], -i)
        }  # fmt: skip
        able.sort(key=ranks.get(first, lambda i: (not is_block[i], -i)))
        waits_in_slab = self.plan.step.update_order is UpdateOrder.FORWARD and self.plan.gradients.sums is Tier.HBM
        waits = waits_in_slab and {i for i in able if self.plan.layers[i].gradients is Tier.HOST}
        gradients = [(SpillKind.GRADIENT, i) for i in able if waits and i in waits]
        state = [(SpillKind.STATE, i) for i in able]
        readable = able if self.plan.hosts.num_gpus == 1 else []
        weights = [(SpillKind.WEIGHTS, i) for i in readable if is_block[i] and layers[i].size == layers[i].trained.size]
        both = [*state, *gradients] if first is SpillFirst.STATE else [*gradients, *state]
        return [*both, *weights]

    @cached_property
    def _moving(self) -> list[Item]:
        moving = ((kind, i) for i, layer in enumerate(self.plan.layers) for kind in away(layer))
        return list(moving) if self.activations else []

    def gained(self, first: SpillFirst) -> Iterator[int]:
        """Yield by how many bytes host memory shrinks with none, one, two, … items of this order on disk."""
        *by_some, by_all = self._by_moving
        yield from by_some
        of_shards = ((kind, self._size(kind, i)) for kind, i in self._shard_items(first))
        yield from (by_all + more for more in self._spilling.gained(of_shards, self._deferred_bytes))

    @cached_property
    def _spilling(self) -> Spilling:
        return Spilling.of(self.plan)

    @cached_property
    def _deferred_bytes(self) -> int:
        return deferred_bytes(self.plan, self.layout)

    @cached_property
    def _by_moving(self) -> list[int]:
        """Return by how many bytes host memory shrinks with none, one, two, … activations on disk."""
        buffers, live, on_disk = StagingBuffers(0, 0), self.plan.step.num_live_micro_batches, Counter[int]()
        gained, freed, num_blocks = [0], 0, 0
        for size in (self._size(*item) for item in self._moving):
            if size > max(on_disk, default=0):
                buffers = StagingBuffers.of([size])
                num_blocks = sum(count * buffers.num_blocks([other]) for other, count in on_disk.items())
            on_disk[size] += live
            freed += live * size
            num_blocks += live * buffers.num_blocks([size])
            taken = buffers.number * buffers.num_bytes + WORD_BYTES * num_blocks
            gained.append(self.plan.hosts.gpus_per_host * (freed - taken))
        return gained

    def _choice(self, missing: int, first: SpillFirst) -> LayersOnDisk:
        items, most, count_of_most = self.order(first), 0, 0
        for count, gained in enumerate(self.gained(first)):
            if gained >= missing:
                return self._without_needless(items[:count], missing)
            if gained > most:
                most, count_of_most = gained, count
        return _on_disk(items[:count_of_most])

    def _without_needless(self, items: list[Item], missing: int) -> LayersOnDisk:
        """Return the choice without data of shards that is not needed beside something larger.

        Such data comes earlier in the order than what is larger. Items that stay in memory are taken from the end of
        the order.
        """
        on_disk, needed = _on_disk(items), set[tuple[SpillKind | Activations, int]]()
        for kind, layer in reversed(items[:-1]):
            size = self._size(kind, layer)
            is_held = isinstance(kind, Activations) or (kind is SpillKind.STATE and layer in on_disk.weights)
            if is_held or (kind, size) in needed:
                continue
            field = FIELDS[kind]
            fewer = on_disk._replace(**{field: getattr(on_disk, field) - {layer}})
            if self.gain(fewer) >= missing:
                on_disk = fewer
            else:
                needed.add((kind, size))
        return on_disk

    def gain(self, on_disk: LayersOnDisk) -> int:
        """Return by how many bytes host memory shrinks with this on disk."""
        moving = Counter(self._size(kind, i) for kind in Activations for i in getattr(on_disk, FIELDS[kind]))
        moved, live = 0, self.plan.step.num_live_micro_batches
        if moving:
            buffers = StagingBuffers.of([max(moving)])
            num_blocks = sum(count * buffers.num_blocks([size]) for size, count in moving.items())
            freed = sum(count * size for size, count in moving.items()) - WORD_BYTES * num_blocks
            moved = self.plan.hosts.gpus_per_host * (live * freed - buffers.number * buffers.num_bytes)
        sizes = Sizes(*([self.layout.host_trained_sizes[i] for i in layers] for layers in on_disk[:3]))
        return moved + self._spilling.gain(sizes, self._deferred_bytes)

    def num_bytes(self, on_disk: LayersOnDisk) -> int:
        """Return the bytes that this takes on disk, not filled up to whole pages."""
        plan, live = self.plan, self.plan.hosts.gpus_per_host * self.plan.step.num_live_micro_batches
        items = (
            plan.gradients.offload_dtype.itemsize,
            plan.precision.state_bytes,
            plan.precision.working_dtype.itemsize,
            live,
            live,
        )
        sizes = [sum([self._size(kind, i) for i in getattr(on_disk, field)]) for kind, field in FIELDS.items()]
        return sum(map(mul, items, sizes))

    def _size(self, kind: SpillKind | Activations, layer: int) -> int:
        """Return the trained elements of a layer, or the bytes of its activations of one micro-batch."""
        if isinstance(kind, Activations):
            return num_bytes(self.plan.layers[layer], kind)
        return self.layout.host_trained_sizes[layer]


def _on_disk(items: Sequence[Item]) -> LayersOnDisk:
    return LayersOnDisk(*(frozenset(i for kind, i in items if kind is wanted) for wanted in FIELDS))
