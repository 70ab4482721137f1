"""Which layers' optimizer state is on disk: as few as host memory needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain_ray.engine.layout import ModelLayout
from megatrain_ray.engine.model import LayerKind, ModelStructure
from megatrain_ray.engine.plan import Plan, Tier
from megatrain_ray.io.blob_store import ALIGN_BYTES, aligned

# Of the layers on their way between disk and updates: one is read, one updated, one written.
STATE_SLOTS = 3


def spilled_layers(plan: Plan, structure: ModelStructure, layout: ModelLayout, missing: int) -> frozenset[int]:
    """`plan`: in which nothing spills and whose host lacks `missing` bytes. All that can, where that is not enough."""
    order, freed = _spill_order(plan, structure, layout), 0
    for count, layer in enumerate(order, 1):
        freed += _state_bytes(plan, layout, layer)
        if freed - slots_bytes(plan, layout, order[:count]) >= missing:
            return frozenset(order[:count])
    return frozenset(order)


def slots_bytes(plan: Plan, layout: ModelLayout, spilled: Sequence[int]) -> int:
    """Host memory that these layers' state passes through, of all shards together and at most."""
    if not spilled:
        return 0
    largest = max(layout.layers[i].trained.size for i in spilled)
    of_shard = min(largest, -(-largest // plan.num_shards) + plan.shard_cut_elements)
    kinds = plan.precision.state_kinds
    slot_bytes = sum(aligned(of_shard * dtype.itemsize) for _, dtype in kinds)
    return plan.num_shards * (plan.state_slots * slot_bytes + ALIGN_BYTES)


def spilled_bytes(plan: Plan, layout: ModelLayout) -> int:
    """On disk, of all shards together and at most."""
    filled_up = plan.num_shards * len(plan.precision.state_kinds) * ALIGN_BYTES
    return sum(_state_bytes(plan, layout, layer) + filled_up for layer in plan.spilled_layers)


def _state_bytes(plan: Plan, layout: ModelLayout, layer: int) -> int:
    return layout.layers[layer].trained.size * plan.precision.state_bytes


def _spill_order(plan: Plan, structure: ModelStructure, layout: ModelLayout) -> list[int]:
    """Blocks from the last on: the next forward comes to them last, so there is most time until their update must be
    done. Then the ends, which may be many times as large, and slots with them. Not what Muon trains something of."""
    able = [i for i in plan.host_layers if layout.layers[i].trained.size and not layout.layers[i].num_muon]
    return sorted(able, key=lambda i: (structure.layers[i].kind is not LayerKind.BLOCK, -i))


def beyond_disk(plan: Plan) -> int:
    """Bytes beyond what may be on disk."""
    limit = plan.spill_limit_bytes
    return max(0, plan.total_bytes(Tier.NVME) - (0 if limit is None else limit))
