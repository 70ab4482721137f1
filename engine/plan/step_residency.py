"""Determines which fragments are in a plan's slots during a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId, Residency, group_of, plan_residency
from megatrain_ray.engine.plan.schedule import Visit


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
    of_layers = [streamed(needed_fragments(layout, layer), resident) for layer in range(len(layout.layers))]
    needs = [of_layers[visit.layer] for visit in visits]
    return plan_residency(needs, num_bytes, groups, plan.slots.weights)


def needed_fragments(layout: ModelLayout, layer: int) -> tuple[FragmentId, ...]:
    """Return the fragments that a visit to a layer needs: its own and those of the owners of its tied parameters."""
    return tuple(FragmentId(i, f) for i in layout.sources[layer] for f in range(len(layout.layers[i].fragments)))


def streamed(fragments: Sequence[FragmentId], hbm_layers: Set[int]) -> tuple[FragmentId, ...]:
    """Return the fragments whose layers stream: those that do not live on the device."""
    return tuple(fragment for fragment in fragments if fragment.layer not in hbm_layers)
