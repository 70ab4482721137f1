"""Says which part of a model's state one optimizer shard owns, and where it keeps it (ShardLayout)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import torch

from megatrain_ray.engine.layout.flat_layout import CUT_ELEMENTS, ElementRange, round_up, starts_of
from megatrain_ray.engine.layout.model_layout import ModelLayout


@dataclass(frozen=True)
class ShardLayout:
    """Describes what one shard of a host owns.

    It owns a contiguous span of the host's share of every layer's trained part, and one of every frozen part. The state
    of the trained spans is stored one after the other in its state arenas.
    """

    model: ModelLayout
    index: int  # among the shards of this host
    num_shards: int  # of this host
    granularity: int = CUT_ELEMENTS  # spans are cut at multiples of so many elements
    layers: Set[int] | None = None  # that are divided among these shards, which own nothing of others; None: all
    spilled: Set[int] = frozenset()  # of these: state on disk, so no room in the arenas (plan/spill_layout.py)
    on_disk: Set[int] = frozenset()  # of the spilled ones: the working copy is on disk, too

    @property
    def number(self) -> int:  # among the shards of all hosts
        return self.model.host * self.num_shards + self.index

    @cached_property
    def spans(self) -> tuple[ElementRange, ...]:
        """Return what the shard owns of each layer's trained part, in padded coordinates of that layer."""
        return tuple(self._cut(i, share.trained) for i, share in enumerate(self.model.shares))

    @cached_property
    def frozen_spans(self) -> tuple[ElementRange, ...]:
        """Return what the shard owns of each layer's frozen part. It loads and saves it, and has no state for it."""
        return tuple(self._cut(i, share.frozen) for i, share in enumerate(self.model.shares))

    def _cut(self, layer: int, part: ElementRange) -> ElementRange:
        if self.layers is not None and layer not in self.layers:
            return ElementRange(part.start, part.start)
        return self.model.layers[layer].cuts(part, self.num_shards, self.granularity)[self.index]

    @cached_property
    def working_starts(self) -> tuple[int, ...]:
        """Return the first element of each layer in the arena of the working copies that these shards write."""
        return self.model.starts_among(self._working_layers)

    @property
    def working_size(self) -> int:
        return self.model.size_among(self._working_layers)

    @property
    def _working_layers(self) -> Set[int] | None:
        if not self.on_disk:
            return self.layers
        return (frozenset(range(len(self.model.layers))) if self.layers is None else self.layers) - self.on_disk

    @cached_property
    def filled(self) -> frozenset[int]:
        """Return the layers whose initial values are loaded. In aliased memory, no earlier layer has their memory."""
        return self.model.first_among(self.layers)

    @cached_property
    def v_spans(self) -> tuple[ElementRange, ...]:
        """Return the part of each of `spans` that has a second moment: what AdamW trains."""
        stops = [layer.adamw.stop for layer in self.model.layers]
        return tuple(
            ElementRange(min(span.start, stop), min(span.stop, stop))
            for span, stop in zip(self.spans, stops, strict=True)
        )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return the first element of each layer's part in this shard's state arenas. Spilled layers take no room."""
        return starts_of(self._in_memory(self.spans), self._aliased_size)

    @cached_property
    def v_starts(self) -> tuple[int, ...]:
        """Return the same for the arena of second moments."""
        return starts_of(self._in_memory(self.v_spans), self._aliased_size)

    def _in_memory(self, spans: Sequence[ElementRange]) -> list[int]:
        return [0 if i in self.spilled else span.size for i, span in enumerate(spans)]

    def _held(self, spans: Sequence[ElementRange]) -> int:
        size = sum(self._in_memory(spans))
        return size if self._aliased_size is None else min(size, self._aliased_size)

    @cached_property
    def _aliased_size(self) -> int | None:
        """Return the shard's share of the model's aliased size, but at least its largest span; None: not aliased."""
        if self.model.aliased_size is None:
            return None
        share = round_up(self.model.aliased_size // self.num_shards, CUT_ELEMENTS)
        return max(share, *(span.size for span in self.spans))

    def span_of(self, layer: int, kind: str) -> ElementRange:
        """Return the span of a layer's state of one kind that the shard owns, in padded coordinates of the layer."""
        return (self.v_spans if kind == "v" else self.spans)[layer]

    @property
    def size(self) -> int:
        return self._held(self.spans)

    def size_of(self, kind: str) -> int:
        """Return the padded elements of one kind of the shard's state."""
        return self._held(self.v_spans) if kind == "v" else self.size

    def num_bytes(self, kinds: Iterable[tuple[str, torch.dtype]]) -> int:
        return sum(self.size_of(kind) * dtype.itemsize for kind, dtype in kinds)

    def slice(self, layer: int) -> slice:
        """Return where the layer's part lies in this shard's state arenas, in elements."""
        return slice(self.starts[layer], self.starts[layer] + self.spans[layer].size)
