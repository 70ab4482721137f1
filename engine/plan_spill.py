"""Which layers' optimizer state is on disk: as few as host memory needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatrain_ray.engine.layout import ModelLayout
from megatrain_ray.engine.model import LayerKind, ModelStructure
from megatrain_ray.engine.plan import Plan, Tier
from megatrain_ray.engine.spill_layout import BLOCK_BYTES, SLOT_WORDS
from megatrain_ray.io.blob_store import ALIGN_BYTES, aligned
from megatrain_ray.io.words import WORD_BYTES

# Of the layers on their way between disk and updates: one is read, one updated, one written.
STATE_SLOTS = 3


@dataclass(frozen=True)
class SpillOrder:
    """The layers of a plan that can spill, those that spill first before the others. `gained`: by how many bytes of
    host memory it takes less with none, one, two, … of them on disk."""

    layers: tuple[int, ...]
    gained: tuple[int, ...]

    @staticmethod
    def of(plan: Plan, structure: ModelStructure, layout: ModelLayout) -> SpillOrder:
        """Blocks from the last on: the next forward comes to them last, so there is most time until their update must
        be done. Then the ends, which may be many times as large, and slots with them. Not what Muon trains something
        of: the GPU worker reads its momenta."""
        able = [i for i in plan.host_layers if layout.layers[i].trained.size and not layout.layers[i].num_muon]
        order = sorted(able, key=lambda i: (structure.layers[i].kind is not LayerKind.BLOCK, -i))
        sizes = [layout.layers[i].trained.size for i in order]
        freed = accumulate(size * plan.precision.state_bytes - _sums_bytes(plan, size) for size in sizes)
        slots = (_slots_bytes(plan, largest) for largest in accumulate(sizes, max))
        return SpillOrder(tuple(order), (0, *(a - b for a, b in zip(freed, slots, strict=True))))

    def first(self, missing: int) -> frozenset[int]:
        """As few as make up for so many bytes; as many as free the most, which may be none, where none are enough."""
        enough = (count for count, num_bytes in enumerate(self.gained) if num_bytes >= missing)
        return frozenset(self.layers[: next(enough, self.gained.index(max(self.gained)))])


def slots_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Host memory that spilled state passes through, of all shards together and at most."""
    sizes = _spilled_sizes(plan, layout)
    return _slots_bytes(plan, max(sizes)) + sum(_sums_bytes(plan, size) for size in sizes) if sizes else 0


def spilled_bytes(plan: Plan, layout: ModelLayout) -> int:
    """On disk, of all shards together and at most."""
    sizes = _spilled_sizes(plan, layout)
    return sum(sizes) * plan.precision.state_bytes + len(sizes) * _filled_up(plan)


def beyond_disk(plan: Plan) -> int:
    """Bytes beyond what may be on disk."""
    limit = plan.spill_limit_bytes
    return max(0, plan.total_bytes(Tier.NVME) - (0 if limit is None else limit))


def _spilled_sizes(plan: Plan, layout: ModelLayout) -> Sequence[int]:
    """Elements of each spilled layer's trained part."""
    return [layout.layers[i].trained.size for i in plan.spilled_layers]


def _slots_bytes(plan: Plan, largest: int) -> int:
    """Without checksums. `largest`: elements of the largest layer."""
    of_shard = min(largest, -(-largest // plan.num_shards) + plan.shard_cut_elements)
    slot_bytes = sum(aligned(of_shard * dtype.itemsize) for _, dtype in plan.precision.state_kinds)
    # Slots and the end of the table are aligned.
    return plan.num_shards * (STATE_SLOTS * (slot_bytes + SLOT_WORDS * WORD_BYTES) + 2 * ALIGN_BYTES)


def _sums_bytes(plan: Plan, size: int) -> int:
    """Of the checksums of the blocks of a layer of so many elements."""
    blocks = (size * plan.precision.state_bytes + _filled_up(plan)) // BLOCK_BYTES + plan.num_shards
    return WORD_BYTES * blocks


def _filled_up(plan: Plan) -> int:
    """Bytes of a layer on disk, at most, that only make every kind of every shard begin at a page."""
    return plan.num_shards * len(plan.precision.state_kinds) * ALIGN_BYTES
