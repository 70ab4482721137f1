"""Lays out what a shard spills to disk: optimizer state, and gradients that wait for their update. Pure.

The shard's blob consists of extents. Each holds a part of one layer, and is small enough that host memory has room for
several of them whatever the size of a layer. Updates access extents through slots in host memory. A slot is as large as
the largest extent.

    state extent: working copy (if it spills, too) | residual | m | v, each starting at a multiple of ALIGN_BYTES
    gradient extent: gradient of as many elements as take no more bytes than a state extent
    blob: for each part of a layer its gradient, then its state; parts in the order of updates
    memory: slot after slot | the table

The table says what each slot holds. For each block of the blob it has the checksum, and the number of bytes that are
stored if the block is packed (storage/packed_store.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import torch

from megatrain_ray.engine.layout.flat_layout import CUT_ELEMENTS, ElementRange, FlatLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.undo_log import UNIT_ELEMENTS
from megatrain_ray.io.storage.blob_store import aligned
from megatrain_ray.io.storage.packed_store import Packable
from megatrain_ray.io.words.atomic_words import WORD_BYTES

BLOCK_BYTES = 8 << 20  # one transfer, with one checksum; disks reach their full rate at a few MiB
SLOT_WORDS = 2  # table words per slot: the extent that it holds, and whether that must still be written to the blob
BLOCK_WORDS = 2  # table words per block: its checksum, and how many bytes of it are stored
# Extents, except the last of a layer, may be smaller than the maximum by up to this many elements. An extent ends where
# a unit of the journal begins, and not in the padding after a parameter or at the end of the layer.
SLACK_ELEMENTS = UNIT_ELEMENTS + CUT_ELEMENTS
GRADIENT = "gradient"  # the only kind in an extent that holds a gradient
WORKING = "working"  # the first kind in an extent that holds a working copy


@dataclass(frozen=True)
class Extent:
    """Describes the state or the gradient of a part of a layer in the blob.

    span: its elements, in padded coordinates of the layer.
    start, nbytes: it takes bytes [start, start + nbytes) of the blob; both are multiples of ALIGN_BYTES.
    kinds: bytes of each kind within the extent, without alignment padding.
    first_block: number of its first block among all blocks of the blob.
    """

    layer: int
    span: ElementRange
    start: int
    nbytes: int
    kinds: Mapping[str, ElementRange]
    first_block: int

    @property
    def is_gradient(self) -> bool:
        return GRADIENT in self.kinds

    @cached_property
    def blocks(self) -> list[ElementRange]:
        """Return the byte range of each block within the extent."""
        return [block for _, block in self.kinds_and_blocks]

    @property
    def kinds_and_blocks(self) -> list[tuple[str, ElementRange]]:
        """Return each block with its kind. A block holds one kind only, with the alignment padding after it."""
        filled = ((kind, ElementRange(span.start, aligned(span.stop))) for kind, span in self.kinds.items())
        return [(kind, block) for kind, span in filled for block in _blocks(span)]

    @property
    def working_blocks(self) -> list[ElementRange]:
        """Return the blocks of the working copy. They come first, because the working copy is also read by itself."""
        return [block for kind, block in self.kinds_and_blocks if kind == WORKING]

    @property
    def working_bytes(self) -> int:
        """Return the bytes of these blocks. Only for an extent that holds a working copy."""
        return aligned(self.kinds[WORKING].size)

    def itemsize(self, kind: str) -> int:
        """Return the bytes of an element of one kind."""
        return self.kinds[kind].size // self.span.size


@dataclass(frozen=True)
class SpillLayout:
    """Describes one shard's blob and the host memory that its extents pass through.

    extents: in the order in which updates visit them. Those of a layer begin with its first element, and the gradient
        of a part comes before its state. Layers of which the shard owns nothing have none.
    num_slots: how many extents host memory has room for.
    offload_dtype: type of the gradients.
    """

    extents: Sequence[Extent]
    num_slots: int
    offload_dtype: torch.dtype = torch.float32

    @staticmethod
    def of(
        part: ShardLayout, precision: Precision, order: Sequence[int], num_slots: int, extent_elements: int,
        stored: Set[int] = frozenset(), offload_dtype: torch.dtype = torch.float32,
    ) -> SpillLayout:  # fmt: skip
        """Lay out the blob of one shard.

        order: layers in the order in which updates visit them, including those that do not spill.
        num_slots: upper bound on the number of slots.
        extent_elements: most elements of state in an extent; must exceed SLACK_ELEMENTS.
        stored: layers whose gradients wait on disk, as `offload_dtype`.
        """
        extents: list[Extent] = []
        for layer in order:
            for span, kinds in _parts(part, precision, layer, extent_elements, stored, offload_dtype):
                last = extents[-1] if extents else Extent(layer, span, 0, 0, {}, 0)
                first_block = last.first_block + len(last.blocks)
                placed, nbytes = _placed(kinds, span.size)
                extents.append(Extent(layer, span, last.start + last.nbytes, nbytes, placed, first_block))
        return SpillLayout(tuple(extents), min(num_slots, len(extents)), offload_dtype)

    def state_of(self, layer: int) -> Sequence[int]:
        """Return the indices in `extents` of the layer's state. Empty for a layer whose state does not spill."""
        return self._numbers[False].get(layer, ())

    def gradients_of(self, layer: int) -> Sequence[int]:
        """Return the indices in `extents` of the layer's gradient. Empty if it does not wait on disk."""
        return self._numbers[True].get(layer, ())

    def working_of(self, layer: int, span: ElementRange) -> Iterator[tuple[int, ElementRange]]:
        """Yield the extents that must be read for some elements of a layer whose working copy is on disk.

        Each comes as its index in `extents`, with the elements of `span` that it holds. An extent's working copy is
        read as a whole.

        span: elements, in padded coordinates of the layer.
        """
        for number in self.state_of(layer):
            extent_span = self.extents[number].span
            inside = ElementRange(max(span.start, extent_span.start), min(span.stop, extent_span.stop))
            if inside.start < inside.stop:
                yield number, inside

    @cached_property
    def _numbers(self) -> Mapping[bool, Mapping[int, Sequence[int]]]:
        """Return indices of extents by whether they hold a gradient (True) or state (False), then by layer."""
        found: dict[bool, dict[int, list[int]]] = {False: {}, True: {}}
        for number, extent in enumerate(self.extents):
            found[extent.is_gradient].setdefault(extent.layer, []).append(number)
        return found

    @property
    def layers(self) -> Sequence[int]:
        """Return the layers whose state spills, in the order in which updates visit them."""
        return tuple(self._numbers[False])

    @property
    def stores_gradients(self) -> bool:
        return bool(self._numbers[True])

    @property
    def blob_bytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)

    @cached_property
    def slot_bytes(self) -> int:
        return max((extent.nbytes for extent in self.extents), default=0)

    @property
    def block_bytes(self) -> int:
        """Return an upper bound on the bytes of a block."""
        return min(BLOCK_BYTES, self.slot_bytes)

    @property
    def num_words(self) -> int:
        """Return the number of words of the table."""
        return self.first_checksum + BLOCK_WORDS * self.num_blocks

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the blob."""
        return sum(len(extent.blocks) for extent in self.extents)

    @property
    def first_checksum(self) -> int:
        """Return the index of the table's word that holds the checksum of block 0."""
        return SLOT_WORDS * self.num_slots

    @property
    def packable(self) -> Mapping[int, Packable]:
        """Return the blocks that can be packed, by their first byte in the blob.

        These are the blocks of floats. A residual's bytes look random, so packing would save nothing.
        """
        first = self.first_checksum + self.num_blocks
        return {
            extent.start + block.start: Packable(first + extent.first_block + index, extent.itemsize(kind))
            for extent in self.extents
            for index, (kind, block) in enumerate(extent.kinds_and_blocks)
            if kind != "residual"
        }

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of host memory for slots and table."""
        return self.num_slots * self.slot_bytes + aligned(WORD_BYTES * self.num_words)


def _blocks(span: ElementRange) -> list[ElementRange]:
    starts = range(span.start, span.stop, BLOCK_BYTES)
    return [ElementRange(start, min(start + BLOCK_BYTES, span.stop)) for start in starts]


def _cut(layer: FlatLayout, span: ElementRange, most: int) -> Iterator[ElementRange]:
    """Yield parts of the span of at most `most` elements.

    Cuts are where units of the journal begin, so that a part can be updated independently of the others.
    """
    start, runs = span.start, list(layer.runs(span))
    while span.stop - start > most:
        run = next(run for run in reversed(runs) if run.padded <= start + most)
        inside = min(start + most - run.padded, run.length - 1)
        stop = run.padded + inside // UNIT_ELEMENTS * UNIT_ELEMENTS
        yield ElementRange(start, stop)
        start = stop
    yield ElementRange(start, span.stop)


Kinds = Sequence[tuple[str, torch.dtype]]


def _parts(
    part: ShardLayout, precision: Precision, layer: int, extent_elements: int, stored: Set[int],
    offload_dtype: torch.dtype,
) -> Iterator[tuple[ElementRange, Kinds]]:  # fmt: skip
    """Yield the elements and the kinds of each extent of a layer, in the order of an update."""
    if not part.spans[layer].size or layer not in part.spilled | stored:
        return
    spans = [*_cut(part.model.layers[layer], part.spans[layer], extent_elements)]
    kinds = kinds_on_disk(precision, with_weights=layer in part.on_disk)
    together = parts_per_gradient(precision, offload_dtype)
    for first in range(0, len(spans), together):
        gradient_spans = spans[first : first + together]
        if layer in stored:
            yield ElementRange(gradient_spans[0].start, gradient_spans[-1].stop), ((GRADIENT, offload_dtype),)
        if layer in part.spilled:
            yield from ((span, kinds) for span in gradient_spans)


def kinds_on_disk(precision: Precision, *, with_weights: bool) -> Kinds:
    """Return the kinds in a state extent of a layer, with their types.

    with_weights: whether the layer's working copy is on disk, too.
    """
    return ((WORKING, precision.working_dtype), *precision.state_kinds) if with_weights else precision.state_kinds


def parts_per_gradient(precision: Precision, offload_dtype: torch.dtype) -> int:
    """Return how many parts of a layer share a gradient extent: as many as take no more bytes than one part's state."""
    return max(1, precision.state_bytes // offload_dtype.itemsize)


def _placed(kinds: Kinds, size: int) -> tuple[dict[str, ElementRange], int]:
    """Return the bytes of each kind within an extent of `size` elements, and the size of the extent in bytes."""
    placed: dict[str, ElementRange] = {}
    start = 0
    for kind, dtype in kinds:
        placed[kind] = ElementRange(start, start + size * dtype.itemsize)
        start += aligned(size * dtype.itemsize)
    return placed, start
