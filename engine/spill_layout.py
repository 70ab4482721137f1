"""SpillLayout: where a shard keeps optimizer state that host memory has no room for. Pure.

Each spilled layer has an extent of the shard's blob, and updates see it through slots in host memory, which have room
for the largest extent each:

    extent: residual | m | v, each from a multiple of ALIGN_BYTES on
    memory: slot after slot | the table: what each slot holds, and the checksum of every block of the blob
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatrain_ray.engine.flat_layout import Span
from megatrain_ray.engine.plan import Precision
from megatrain_ray.engine.shard_layout import ShardLayout
from megatrain_ray.io.blob_store import aligned
from megatrain_ray.io.words import WORD_BYTES

BLOCK_BYTES = 8 << 20  # one transfer, under one checksum; disks have their full rate from some MiB on
SLOT_WORDS = 2  # of the table: the layer that a slot holds, and whether the blob lacks what it holds


@dataclass(frozen=True)
class Extent:
    """A layer's state in the blob: bytes [start, start + nbytes), both multiples of ALIGN_BYTES. `kinds`: where each
    kind lies in it, without what fills it up. `first_block`: the number of its first block among all of the blob."""

    start: int
    nbytes: int
    kinds: Mapping[str, Span]
    first_block: int

    @property
    def blocks(self) -> list[Span]:
        """The bytes of each block, in the extent."""
        starts = range(0, self.nbytes, BLOCK_BYTES)
        return [Span(start, min(start + BLOCK_BYTES, self.nbytes)) for start in starts]


@dataclass(frozen=True)
class SpillLayout:
    """`extents`: by layer, in the order in which updates visit them; layers of which the shard owns nothing have none.
    `num_slots`: how many of them host memory has room for."""

    extents: Mapping[int, Extent]
    num_slots: int

    @staticmethod
    def of(part: ShardLayout, precision: Precision, order: Sequence[int], num_slots: int) -> SpillLayout:
        """`order`: in which updates visit layers, those that do not spill among them."""
        extents: dict[int, Extent] = {}
        start = first_block = 0
        for layer in order:
            if layer not in part.spilled or not part.spans[layer].size:
                continue
            kinds, nbytes = _kinds(part, precision, layer)
            extents[layer] = Extent(start, nbytes, kinds, first_block)
            start += nbytes
            first_block += len(extents[layer].blocks)
        return SpillLayout(extents, min(num_slots, len(extents)))

    @property
    def blob_bytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents.values())

    @cached_property
    def slot_bytes(self) -> int:
        return max((extent.nbytes for extent in self.extents.values()), default=0)

    @property
    def num_words(self) -> int:
        """Of the table."""
        return SLOT_WORDS * self.num_slots + sum(len(extent.blocks) for extent in self.extents.values())

    @property
    def memory_bytes(self) -> int:
        """Host memory that is taken: slots and table."""
        return self.num_slots * self.slot_bytes + aligned(WORD_BYTES * self.num_words)


def _kinds(part: ShardLayout, precision: Precision, layer: int) -> tuple[dict[str, Span], int]:
    """Where each kind of a layer's state lies in its extent, and the extent's size."""
    kinds: dict[str, Span] = {}
    start = 0
    for kind, dtype in precision.state_kinds:
        num_bytes = part.span_of(layer, kind).size * dtype.itemsize
        kinds[kind] = Span(start, start + num_bytes)
        start += aligned(num_bytes)
    return kinds, start
