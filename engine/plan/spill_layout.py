"""SpillLayout: where a shard keeps what host memory has no room for: optimizer state, gradients in waiting. Pure.

The shard's blob is made of extents: of a part of a layer each, small enough that host memory has room for some of them
whatever the size of a layer. Updates see them through slots in host memory, as large as the largest extent:

    extent: residual | m | v, each from a multiple of ALIGN_BYTES on, and before them the working copy where that is
        here, too; or gradient, of as many elements as take no more
    blob: of each part of a layer the gradient, then the state, in the order of updates
    memory: slot after slot | the table: what each slot holds, of every block of the blob its checksum, and how much of
        it is stored where it is packed (storage/packed_store.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import torch

from megatrain_ray.engine.layout.flat_layout import CUT_ELEMENTS, FlatLayout, Span
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.undo_log import UNIT_ELEMENTS
from megatrain_ray.io.storage.blob_store import aligned
from megatrain_ray.io.storage.packed_store import Packable
from megatrain_ray.io.words.atomic_words import WORD_BYTES

BLOCK_BYTES = 8 << 20  # one transfer, under one checksum; disks have their full rate from some MiB on
SLOT_WORDS = 2  # of the table: the extent that a slot holds, and whether the blob lacks what it holds
BLOCK_WORDS = 2  # of the table: a block's checksum, and how many bytes of it are stored
# By how much an extent may be smaller than it may be, but for the last of a layer: it ends where a unit of the journal
# begins, not in what aligns parameters and fills the layer up.
SLACK_ELEMENTS = UNIT_ELEMENTS + CUT_ELEMENTS
GRADIENT = "gradient"  # the kind of an extent that holds one
WORKING = "working"  # the first kind of an extent that holds a working copy


@dataclass(frozen=True)
class Extent:
    """State or gradient of a part of a layer in the blob: bytes [start, start + nbytes), both multiples of ALIGN_BYTES.
    `span`: its elements, in padded coordinates of the layer. `kinds`: where each kind lies in it, without what fills it
    up. `first_block`: the number of its first block among all of the blob."""

    layer: int
    span: Span
    start: int
    nbytes: int
    kinds: Mapping[str, Span]
    first_block: int

    @property
    def is_gradient(self) -> bool:
        return GRADIENT in self.kinds

    @cached_property
    def blocks(self) -> list[Span]:
        """The bytes of each block, in the extent."""
        return [block for _, block in self.kinds_and_blocks]

    @property
    def kinds_and_blocks(self) -> list[tuple[str, Span]]:
        """The blocks, of one kind each, with what fills it up."""
        filled = ((kind, Span(span.start, aligned(span.stop))) for kind, span in self.kinds.items())
        return [(kind, block) for kind, span in filled for block in _blocks(span)]

    @property
    def working_blocks(self) -> list[Span]:
        """Of these the ones with the working copy, which are the first: it is read alone, too."""
        return [block for kind, block in self.kinds_and_blocks if kind == WORKING]

    @property
    def working_bytes(self) -> int:
        """Of these blocks."""
        return aligned(self.kinds[WORKING].size)

    def itemsize(self, kind: str) -> int:
        """Bytes of an element."""
        return self.kinds[kind].size // self.span.size


@dataclass(frozen=True)
class SpillLayout:
    """`extents`: in the order in which updates visit them, those of a layer from its first element on, the gradient of
    a part before its state; layers of which the shard owns nothing have none. `num_slots`: how many of them host memory
    has room for. `wire_dtype`: of gradients."""

    extents: Sequence[Extent]
    num_slots: int
    wire_dtype: torch.dtype = torch.float32

    @staticmethod
    def of(
        part: ShardLayout,
        precision: Precision,
        order: Sequence[int],
        num_slots: int,
        extent_elements: int,
        stored: Set[int] = frozenset(),
        wire_dtype: torch.dtype = torch.float32,
    ) -> SpillLayout:
        """`order`: in which updates visit layers, those that do not spill among them. `extent_elements`: of state in an
        extent at most; more than SLACK_ELEMENTS. `stored`: layers whose gradients wait here, as `wire_dtype`."""
        extents: list[Extent] = []
        for layer in order:
            for span, kinds in _parts(part, precision, layer, extent_elements, stored, wire_dtype):
                last = extents[-1] if extents else Extent(layer, span, 0, 0, {}, 0)
                first_block = last.first_block + len(last.blocks)
                placed, nbytes = _placed(kinds, span.size)
                extents.append(Extent(layer, span, last.start + last.nbytes, nbytes, placed, first_block))
        return SpillLayout(tuple(extents), min(num_slots, len(extents)), wire_dtype)

    def state_of(self, layer: int) -> Sequence[int]:
        """Numbers among `extents` of those with the layer's state; none of a layer whose state does not spill."""
        return self._numbers[False].get(layer, ())

    def gradients_of(self, layer: int) -> Sequence[int]:
        """The same of its gradient."""
        return self._numbers[True].get(layer, ())

    def working_of(self, layer: int, span: Span) -> Iterator[tuple[int, Span]]:
        """Of a layer whose working copy is here, the extents with some of these elements, and which of them each has:
        what is read for them, each extent's working copy as a whole."""
        for number in self.state_of(layer):
            of_extent = self.extents[number].span
            inside = Span(max(span.start, of_extent.start), min(span.stop, of_extent.stop))
            if inside.start < inside.stop:
                yield number, inside

    @cached_property
    def _numbers(self) -> Mapping[bool, Mapping[int, Sequence[int]]]:
        """By whether it is a gradient's, and by layer."""
        found: dict[bool, dict[int, list[int]]] = {False: {}, True: {}}
        for number, extent in enumerate(self.extents):
            found[extent.is_gradient].setdefault(extent.layer, []).append(number)
        return found

    @property
    def layers(self) -> Sequence[int]:
        """Those whose state spills, in the order in which updates visit them."""
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
        """Of a block at most."""
        return min(BLOCK_BYTES, self.slot_bytes)

    @property
    def num_words(self) -> int:
        """Of the table."""
        return self.first_checksum + BLOCK_WORDS * self.num_blocks

    @property
    def num_blocks(self) -> int:
        """Of the blob."""
        return sum(len(extent.blocks) for extent in self.extents)

    @property
    def first_checksum(self) -> int:
        """The table's word that block 0 has its checksum in."""
        return SLOT_WORDS * self.num_slots

    @property
    def packable(self) -> Mapping[int, Packable]:
        """Blocks of floats, by where they begin in the blob; a residual's bytes are all like chance."""
        first = self.first_checksum + self.num_blocks
        return {
            extent.start + block.start: Packable(first + extent.first_block + index, extent.itemsize(kind))
            for extent in self.extents
            for index, (kind, block) in enumerate(extent.kinds_and_blocks)
            if kind != "residual"
        }

    @property
    def memory_bytes(self) -> int:
        """Host memory that is taken: slots and table."""
        return self.num_slots * self.slot_bytes + aligned(WORD_BYTES * self.num_words)


def _blocks(span: Span) -> list[Span]:
    starts = range(span.start, span.stop, BLOCK_BYTES)
    return [Span(start, min(start + BLOCK_BYTES, span.stop)) for start in starts]


def _cut(layer: FlatLayout, span: Span, most: int) -> Iterator[Span]:
    """The span in parts of at most so many elements, cut where units of the journal begin: an update of one part knows
    nothing of the others."""
    start, runs = span.start, list(layer.runs(span))
    while span.stop - start > most:
        run = next(run for run in reversed(runs) if run.padded <= start + most)
        inside = min(start + most - run.padded, run.length - 1)
        stop = run.padded + inside // UNIT_ELEMENTS * UNIT_ELEMENTS
        yield Span(start, stop)
        start = stop
    yield Span(start, span.stop)


Kinds = Sequence[tuple[str, torch.dtype]]


def _parts(
    part: ShardLayout,
    precision: Precision,
    layer: int,
    extent_elements: int,
    stored: Set[int],
    wire_dtype: torch.dtype,
) -> Iterator[tuple[Span, Kinds]]:
    """The extents of a layer, in the order of an update: elements, and what they hold."""
    if not part.spans[layer].size or layer not in part.spilled | stored:
        return
    spans = [*_cut(part.model.layers[layer], part.spans[layer], extent_elements)]
    kinds = kinds_on_disk(precision, with_weights=layer in part.on_disk)
    together = parts_per_gradient(precision, wire_dtype)
    for first in range(0, len(spans), together):
        of_gradient = spans[first : first + together]
        if layer in stored:
            yield Span(of_gradient[0].start, of_gradient[-1].stop), ((GRADIENT, wire_dtype),)
        if layer in part.spilled:
            yield from ((span, kinds) for span in of_gradient)


def kinds_on_disk(precision: Precision, *, with_weights: bool) -> Kinds:
    """Of a layer whose state is on disk, and its working copy where that is."""
    return ((WORKING, precision.working_dtype), *precision.state_kinds) if with_weights else precision.state_kinds


def parts_per_gradient(precision: Precision, wire_dtype: torch.dtype) -> int:
    """Parts of a layer whose gradient takes no more than the state of one."""
    return max(1, precision.state_bytes // wire_dtype.itemsize)


def _placed(kinds: Kinds, size: int) -> tuple[dict[str, Span], int]:
    """Where each kind of so many elements lies in their extent, and the extent's size."""
    placed: dict[str, Span] = {}
    start = 0
    for kind, dtype in kinds:
        placed[kind] = Span(start, start + size * dtype.itemsize)
        start += aligned(size * dtype.itemsize)
    return placed, start
