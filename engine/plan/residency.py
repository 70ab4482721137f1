"""Decides which fragment is in which slot during a step. This is known beforehand, because the access order is.

It follows Belady's rule (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966): where
a slot must be reused, evict the fragment whose next use is farthest. For L layers and S slots this gives L uploads in a
forward and L - S in the backward that follows. That is 2L - S for a step of one micro-batch, and at most that for each
further one.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_groups import SlotSpec
from megatrain_ray.engine.plan.schedule import Visit
from megatrain_ray.errors import CapacityError

NEVER = 1 << 60


@dataclass(frozen=True, order=True)
class FragmentId:
    """Identifies a fragment by its layer and its number in the layer."""

    layer: int
    index: int


def group_of(kind: LayerKind, fragment: int) -> str:
    """Return the group of the slots that a fragment takes: one per fragment index of blocks, one for other layers."""
    return f"block/{fragment}" if kind is LayerKind.BLOCK else "edge"


@dataclass(frozen=True)
class Load:
    """Upload of a fragment into a slot.

    visit: index of the visit that needs the fragment.
    after_visit: index of the visit that must have released the slot before; -1: none.
    """

    fragment: FragmentId
    slot: int
    visit: int
    after_visit: int


@dataclass(frozen=True)
class Residency:
    """Says which fragment is in which slot during the visits of a step.

    loads: uploads in the order in which they are issued.
    slots: slots[v] gives the slot of each fragment that visit v needs.
    released: released[v] are the slots whose content is not needed after visit v.
    """

    loads: tuple[Load, ...]
    slots: tuple[Mapping[FragmentId, int], ...]
    released: tuple[frozenset[int], ...]


@dataclass
class _Occupant:
    fragment: FragmentId
    last_visit: int


@dataclass
class _Simulation:
    specs: Sequence[SlotSpec]
    uses: Mapping[FragmentId, list[int]]
    held: dict[int, _Occupant] = field(default_factory=dict)
    where: dict[FragmentId, int] = field(default_factory=dict)  # slot of each fragment that is in one

    def next_use(self, fragment: FragmentId, after: int) -> int:
        uses = self.uses[fragment]
        position = bisect.bisect_right(uses, after)
        return uses[position] if position < len(uses) else NEVER

    def hold(self, slot: int, fragment: FragmentId, visit: int) -> None:
        before = self.held.get(slot)
        if before:
            del self.where[before.fragment]
        self.held[slot] = _Occupant(fragment, visit)
        self.where[fragment] = slot

    def choose(self, group: str, num_bytes: int, visit: int, needed: frozenset[FragmentId]) -> int | None:
        """Return the smallest free slot that fits, else the fitting one whose fragment is used again last.

        needed: fragments of this visit, which must not be evicted.
        Returns None if there is no such slot.
        """
        fits = [i for i, s in enumerate(self.specs) if s.group == group and s.num_bytes >= num_bytes]
        free = [i for i in fits if i not in self.held]
        if free:
            return min(free, key=lambda i: self.specs[i].num_bytes)
        others = [i for i in fits if self.held[i].fragment not in needed]
        return max(others, key=lambda i: self._farthest(i, visit), default=None)

    def _farthest(self, slot: int, visit: int) -> tuple[int, int]:
        occupant = self.held[slot]
        return self.next_use(occupant.fragment, visit - 1), -occupant.last_visit


def residency_of(visits: Sequence[Visit], structure: ModelStructure, layout: ModelLayout, plan: Plan) -> Residency:
    """Return which fragments are in the plan's slots during these visits, and the loads that this takes.

    Layers that live on the device take no slots.
    """
    item = plan.precision.working_dtype.itemsize
    num_bytes: dict[FragmentId, int] = {}
    groups: dict[FragmentId, str] = {}
    for i, layer in enumerate(layout.layers):
        for f, span in enumerate(layer.fragments):
            num_bytes[FragmentId(i, f)] = span.size * item
            groups[FragmentId(i, f)] = group_of(structure.layers[i].kind, f)
    resident = plan.hbm_layers
    needed_by_layer = [streamed(needed_fragments(layout, layer), resident) for layer in range(len(layout.layers))]
    needs = [needed_by_layer[visit.layer] for visit in visits]
    return plan_residency(needs, num_bytes, groups, plan.slots.weights)


def needed_fragments(layout: ModelLayout, layer: int) -> tuple[FragmentId, ...]:
    """Return the fragments that a visit to a layer needs: its own and those of the owners of its tied parameters."""
    return tuple(FragmentId(i, f) for i in layout.sources[layer] for f in range(len(layout.layers[i].fragments)))


def streamed(fragments: Sequence[FragmentId], hbm_layers: Set[int]) -> tuple[FragmentId, ...]:
    """Return the fragments whose layers stream: those that do not live on the device."""
    return tuple(fragment for fragment in fragments if fragment.layer not in hbm_layers)


def plan_residency(
    visits: Sequence[Sequence[FragmentId]], fragment_bytes: Mapping[FragmentId, int],
    fragment_group: Mapping[FragmentId, str], slots: Sequence[SlotSpec],
) -> Residency:  # fmt: skip
    """Simulate the visits of one step, and return the loads and what is in which slot. Pure.

    visits: the fragments that each visit needs.
    fragment_bytes, fragment_group: size and slot group of each fragment.
    Raises CapacityError if the fragments of a visit do not fit the slots together.
    """
    uses: dict[FragmentId, list[int]] = {}
    for v, fragments in enumerate(visits):
        for fragment in fragments:
            uses.setdefault(fragment, []).append(v)
    simulation = _Simulation(slots, uses)
    loads: list[Load] = []
    during: list[dict[FragmentId, int]] = []
    for v, fragments in enumerate(visits):
        needed = frozenset(fragments)
        for fragment in fragments:
            slot = simulation.where.get(fragment)
            if slot is None:
                slot = simulation.choose(fragment_group[fragment], fragment_bytes[fragment], v, needed)
                if slot is None:
                    raise CapacityError(
                        f"no slot for fragment {fragment.index} of layer {fragment.layer} "
                        f"({fragment_bytes[fragment]} bytes, group {fragment_group[fragment]}): the plan has too few"
                    )
                before = simulation.held.get(slot)
                loads.append(Load(fragment, slot, v, before.last_visit if before else -1))
            simulation.hold(slot, fragment, v)
        during.append({fragment: simulation.where[fragment] for fragment in fragments})
    return Residency(tuple(loads), tuple(during), _released(loads, during))


def _released(loads: Sequence[Load], during: Sequence[Mapping[FragmentId, int]]) -> tuple[frozenset[int], ...]:
    """Return the slots that are released after each visit.

    A slot is released after the last visit that uses its fragment before the slot is refilled or the step ends.
    """
    released: list[set[int]] = [set() for _ in during]
    refilled = {(load.slot, load.after_visit) for load in loads}
    last_use: dict[int, int] = {}
    for v, held in enumerate(during):
        for slot in held.values():
            last_use[slot] = v
            if (slot, v) in refilled:
                released[v].add(slot)
    for slot, v in last_use.items():
        released[v].add(slot)
    return tuple(frozenset(slots) for slots in released)


def regions_of(layers: Sequence[int], needed_bytes: Sequence[int], region_bytes: Sequence[int]) -> dict[int, int]:
    """Return the region of each layer, as an index into `region_bytes`.

    A layer takes the smallest size that holds its gradient. Layers share the regions of that size in turn, in the order
    given; if there is only one, the next larger one as well. So the embedding's and the head's gradient have a region
    to themselves where they are larger than a block's and blocks have two.

    needed_bytes: bytes of the gradient of each of `layers`.
    Raises ValueError for a layer whose gradient fits no region.
    """
    found: dict[int, int] = {}
    used: dict[int, int] = {}  # turn in which each region was taken last
    by_size = sorted(range(len(region_bytes)), key=region_bytes.__getitem__)
    for turn, (layer, needed) in enumerate(zip(layers, needed_bytes, strict=True)):
        fitting = [index for index in by_size if region_bytes[index] >= needed]
        if not fitting:
            raise ValueError(f"layer {layer}: a gradient of {needed} bytes, and regions of {list(region_bytes)}")
        num_alike = sum(region_bytes[index] == region_bytes[fitting[0]] for index in fitting)
        found[layer] = min(fitting[: max(2, num_alike)], key=lambda index: used.get(index, -1))
        used[found[layer]] = turn
    return found
