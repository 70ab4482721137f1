"""Derives from a plan what each optimizer shard owns, and what it has on disk. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.plan.spill_layout import SpillLayout


def shard_layout(plan: Plan, layout: ModelLayout, index: int) -> ShardLayout:
    """Return the layout of shard `index` of a host: its part of the layers on the host, which the CPU updates."""
    return ShardLayout(
        layout,
        index,
        plan.shards.num_shards,
        plan.shards.cut_elements,
        plan.host_layers,
        spilled=plan.spilled_layers,
        on_disk=plan.weights_on_disk,
    )


def spill_layout(plan: Plan, part: ShardLayout) -> SpillLayout:
    """Return the layout of what a shard has on disk."""
    return SpillLayout.of(
        part,
        plan.precision,
        plan.layer_order,
        plan.disk.num_state_slots,
        plan.disk.extent_elements,
        frozenset(plan.gradients_on_disk),
        plan.gradients.offload_dtype,
    )


def read_bytes(plan: Plan, layout: ModelLayout, fragments: Iterable[FragmentId]) -> int:
    """Return the bytes that DiskWeights reads from disk for uploads of these fragments.

    It reads whole pages of every shard's part.
    """
    if not plan.weights_on_disk:
        return 0
    parts = [spill_layout(plan, shard_layout(plan, layout, k)) for k in range(plan.shards.num_shards)]
    spans = ((f.layer, layout.layers[f.layer].fragments[f.index]) for f in fragments if f.layer in plan.weights_on_disk)
    return sum(
        part.extents[number].working_bytes
        for layer, span in spans
        for part in parts
        for number, _ in part.working_of(layer, span)
    )
