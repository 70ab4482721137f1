"""Records, in words in shared memory, what a shard's slots and its blob on disk contain.

The words lie next to the slots. They say which extent each slot holds, and whether it is dirty. For
every block of the blob they hold its checksum and how much of it is stored. A shard that replaces one that died goes on
from them, and readers of working copies learn from them when the blob has these.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from megatrain_ray.engine.plan.spill_layout import SLOT_WORDS, SpillLayout
from megatrain_ray.engine.spill.spill_transfers import Checksums
from megatrain_ray.io.storage.blob_store import BlobStore
from megatrain_ray.io.storage.packed_store import PackedStore
from megatrain_ray.io.words.atomic_words import Words


class SpillTable:
    """Reads and writes these words. Only the shard itself writes them.

    An `extent` is given by its number among `layout.extents`.
    """

    def __init__(self, layout: SpillLayout, memory: Tensor) -> None:
        """Use the table in `memory` (1-D uint8), which holds the slots and then the table."""
        start = layout.num_slots * layout.slot_bytes
        self._words = Words(memory[start : layout.memory_bytes].numpy().data, layout.num_words)
        self._layout = layout
        self.checksums = Checksums(self._words, layout.first_checksum)

    def packing(self, store: BlobStore) -> BlobStore:
        """Return a view of `store` that packs the blob's blocks of floats. The table keeps their packed sizes."""
        return PackedStore(store, self._words, self._layout.packable, self._layout.block_bytes)

    def extent_of(self, slot: int) -> int | None:
        number = self._words.load(SLOT_WORDS * slot)
        return number - 1 if number else None

    def hold(self, slot: int, extent: int | None) -> None:
        self._words.store(SLOT_WORDS * slot, 0 if extent is None else extent + 1)

    def is_dirty(self, slot: int) -> bool:
        """Return whether the blob lacks what the slot holds."""
        return self._words.load(SLOT_WORDS * slot + 1) == 1

    def set_dirty(self, slot: int, is_dirty: bool) -> None:
        self._words.store(SLOT_WORDS * slot + 1, int(is_dirty))

    def lacks(self, extents: Collection[int]) -> bool:
        """Return whether the blob lacks what some slot holds of these extents."""
        return any(self.is_dirty(slot) and self.extent_of(slot) in extents for slot in range(self._layout.num_slots))
