"""Finds all that may be on disk where the host is short of memory.

That is every set of gradients, state, working copies and activations in which nothing is needless.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.activation_moves import Activations, away, num_bytes
from megatrain_ray.engine.plan.plan import LayerPlan, Plan
from megatrain_ray.engine.planner.memory.spill_bytes import SpillKind
from megatrain_ray.engine.planner.memory.spill_choice import FIELDS, LayersOnDisk, Spillable
from megatrain_ray.engine.planner.request import SpillFirst

Sizes = tuple[tuple[int, ...], ...]  # sizes of what is on disk, by kind


@dataclass(frozen=True)
class DiskChoices:
    """Lists what may be on disk of one plan, which has nothing there yet.

    `missing`: bytes of host memory that it lacks.
    """

    plan: Plan
    structure: ModelStructure
    layout: ModelLayout
    missing: int

    def fewest(self) -> list[tuple[int, LayersOnDisk]]:
        """Return the sets that are just enough, each with its bytes on disk, the fewest first."""
        found = [
            (self._spillable.num_bytes(on_disk), on_disk) for on_disk in self._all() if self._is_just_enough(on_disk)
        ]
        return sorted(found, key=lambda pair: pair[0])

    def _all(self) -> Iterator[LayersOnDisk]:
        items = self._spillable.order(SpillFirst.GRADIENTS)
        able = {kind: [i for of_kind, i in items if of_kind is kind] for kind in FIELDS}
        kinds = SpillKind.GRADIENT, SpillKind.STATE, Activations.BOUNDARY, Activations.KEPT
        for stored, spilled, boundaries, kept in itertools.product(*(subsets(able[kind]) for kind in kinds)):
            for weights in subsets(sorted(spilled.intersection(able[SpillKind.WEIGHTS]))):
                yield LayersOnDisk(stored, spilled, weights, boundaries, kept)

    def _is_just_enough(self, on_disk: LayersOnDisk) -> bool:
        return self._is_enough(on_disk) and not any(map(self._is_enough, _with_less(on_disk)))

    def _is_enough(self, on_disk: LayersOnDisk) -> bool:
        key = tuple(tuple(sorted(sizes)) for sizes in self._sizes(on_disk))
        if key not in self._known:
            self._known[key] = self._spillable.gain(on_disk) >= self.missing
        return self._known[key]

    def _sizes(self, on_disk: LayersOnDisk) -> Iterator[list[int]]:
        for layers in on_disk[:3]:
            yield [self.layout.trained_sizes[i] for i in layers]
        for kind, layers in ((Activations.BOUNDARY, on_disk.boundaries), (Activations.KEPT, on_disk.kept)):
            yield [num_bytes(self.plan.layers[i], kind) for i in layers]

    @cached_property
    def _spillable(self) -> Spillable:
        moves = any(away(layer) for layer in self.plan.layers)
        return Spillable(self.plan, self.structure, self.layout, activations=moves)

    @cached_property
    def _known(self) -> dict[Sizes, bool]:
        return {}


def _with_less(on_disk: LayersOnDisk) -> Iterator[LayersOnDisk]:
    """Yield the same set without one of its gradients, or one of its states, and so on."""
    for field, layers in zip(LayersOnDisk._fields, on_disk, strict=True):
        for i in layers:
            fewer = on_disk._replace(**{field: layers - {i}})
            if fewer.weights <= fewer.state:
                yield fewer


def on_disk_of(layer: LayerPlan, index: int, on_disk: LayersOnDisk) -> LayerPlan:
    """Return the layer with those of its parts on disk that `on_disk` names."""
    fields = "gradients", "state", "weights", "boundary", "kept"
    return replace(layer, **{x: Tier.NVME for x, layers in zip(fields, on_disk, strict=True) if index in layers})


def subsets(of: Iterable[int]) -> list[frozenset[int]]:
    layers: Sequence[int] = tuple(of)
    sizes = range(len(layers) + 1)
    return [frozenset(x) for n in sizes for x in itertools.combinations(layers, n)]
