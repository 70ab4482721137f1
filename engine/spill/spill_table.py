"""SpillTable: the words beside a shard's slots: which extent each holds, whether it is ahead of the blob, and of every
block of the blob its checksum and how much of it is stored. In shared memory: a shard that follows one that died goes
on from them, and whoever reads working copies from the blob sees when it has them."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from megatrain_ray.engine.plan.spill_layout import SLOT_WORDS, SpillLayout
from megatrain_ray.engine.spill.spill_transfers import Checksums
from megatrain_ray.io.storage.blob_store import BlobStore
from megatrain_ray.io.storage.packed_store import PackedStore
from megatrain_ray.io.words.atomic_words import Words


class SpillTable:
    """Written by the shard alone. `extent`: its number among `layout.extents`."""

    def __init__(self, layout: SpillLayout, memory: Tensor) -> None:
        """`memory`: 1-D uint8, of slots and table."""
        start = layout.num_slots * layout.slot_bytes
        self._words = Words(memory[start : layout.memory_bytes].numpy().data, layout.num_words)
        self._layout = layout
        self.checksums = Checksums(self._words, layout.first_checksum)

    def packing(self, store: BlobStore) -> BlobStore:
        """The store with the blob, whose blocks of floats are packed: the table says how much of each it has."""
        return PackedStore(store, self._words, self._layout.packable, self._layout.block_bytes)

    def extent_of(self, slot: int) -> int | None:
        """What the slot holds."""
        number = self._words.load(SLOT_WORDS * slot)
        return number - 1 if number else None

    def hold(self, slot: int, extent: int | None) -> None:
        self._words.store(SLOT_WORDS * slot, 0 if extent is None else extent + 1)

    def is_ahead(self, slot: int) -> bool:
        """Whether the blob lacks what the slot holds."""
        return self._words.load(SLOT_WORDS * slot + 1) == 1

    def set_ahead(self, slot: int, is_ahead: bool) -> None:
        self._words.store(SLOT_WORDS * slot + 1, int(is_ahead))

    def lacks(self, extents: Collection[int]) -> bool:
        """Whether some slot is ahead of the blob with one of these."""
        return any(self.is_ahead(slot) and self.extent_of(slot) in extents for slot in range(self._layout.num_slots))
