"""Which layers' optimizer state is on disk: as few as host memory needs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from megatrain_ray.engine.layout import ModelLayout
from megatrain_ray.engine.model import LayerKind, ModelStructure
from megatrain_ray.engine.plan import Plan, Tier
from megatrain_ray.io.blob_store import ALIGN_BYTES, aligned

# Of the layers on their way between disk and updates: one is read, one updated, one written.
STATE_SLOTS = 3


@dataclass(frozen=True)
class SpillOrder:
    """The layers of a plan that can spill, those that spill first before the others, and by how many bytes of host
    memory it takes less with one, two, … of them on disk."""

    layers: tuple[int, ...]
    saved: tuple[int, ...]

    @staticmethod
    def of(plan: Plan, structure: ModelStructure, layout: ModelLayout) -> SpillOrder:
        """Blocks from the last on: the next forward comes to them last, so there is most time until their update must
        be done. Then the ends, which may be many times as large, and slots with them. Not what Muon trains something
        of: the GPU worker reads its momenta."""
        able = [i for i in plan.host_layers if layout.layers[i].trained.size and not layout.layers[i].num_muon]
        order = sorted(able, key=lambda i: (structure.layers[i].kind is not LayerKind.BLOCK, -i))
        sizes = [layout.layers[i].trained.size for i in order]
        freed = (total * plan.precision.state_bytes for total in accumulate(sizes))
        slots = (_slots_bytes(plan, largest) for largest in accumulate(sizes, max))
        return SpillOrder(tuple(order), tuple(a - b for a, b in zip(freed, slots, strict=True)))

    def first(self, missing: int) -> frozenset[int]:
        """As few as make up for so many bytes; all, where they are not enough."""
        count = next((k for k, saved in enumerate(self.saved, 1) if saved >= missing), len(self.layers))
        return frozenset(self.layers[:count])


def slots_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Host memory that spilled state passes through, of all shards together and at most."""
    return _slots_bytes(plan, max((layout.layers[i].trained.size for i in plan.spilled_layers), default=0))


def _slots_bytes(plan: Plan, largest: int) -> int:
    """`largest`: elements of the largest of the layers."""
    of_shard = min(largest, -(-largest // plan.num_shards) + plan.shard_cut_elements)
    kinds = plan.precision.state_kinds
    slot_bytes = sum(aligned(of_shard * dtype.itemsize) for _, dtype in kinds)
    return plan.num_shards * (STATE_SLOTS * slot_bytes + ALIGN_BYTES)


def spilled_bytes(plan: Plan, layout: ModelLayout) -> int:
    """On disk, of all shards together and at most."""
    filled_up = plan.num_shards * len(plan.precision.state_kinds) * ALIGN_BYTES
    sizes = [layout.layers[i].trained.size * plan.precision.state_bytes for i in plan.spilled_layers]
    return sum(sizes) + len(sizes) * filled_up


def beyond_disk(plan: Plan) -> int:
    """Bytes beyond what may be on disk."""
    limit = plan.spill_limit_bytes
    return max(0, plan.total_bytes(Tier.NVME) - (0 if limit is None else limit))
