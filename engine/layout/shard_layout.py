"""ShardLayout: which part of a model's state one optimizer shard owns, and where it keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import torch

from megatrain_ray.engine.layout.flat_layout import CUT_ELEMENTS, Span, round_up, starts_of
from megatrain_ray.engine.layout.model_layout import ModelLayout


@dataclass(frozen=True)
class ShardLayout:
    """What one shard of a host owns: a contiguous span of what the host has of every layer's trained part, stored
    one after the other in its state arenas; and of every frozen part. `index`, `num_shards`: of this host's.
    `layers`: those that are cut among these shards; of others they own nothing. `spilled`: of these the ones whose
    state is on disk, and takes no part of the arenas (plan/spill_layout.py); `on_disk`: of those the ones whose working
    copy is there, too."""

    model: ModelLayout
    index: int
    num_shards: int
    granularity: int = CUT_ELEMENTS
    layers: Set[int] | None = None  # None: all
    spilled: Set[int] = frozenset()
    on_disk: Set[int] = frozenset()

    @property
    def number(self) -> int:
        """Among the shards of all hosts."""
        return self.model.host * self.num_shards + self.index

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Per layer, of what is trained, in padded coordinates of that layer."""
        return tuple(self._cut(i, share.trained) for i, share in enumerate(self.model.shares))

    @cached_property
    def frozen_spans(self) -> tuple[Span, ...]:
        """Per layer, of what is frozen: the shard loads and saves it, and has no state for it."""
        return tuple(self._cut(i, share.frozen) for i, share in enumerate(self.model.shares))

    def _cut(self, layer: int, part: Span) -> Span:
        if self.layers is not None and layer not in self.layers:
            return Span(part.start, part.start)
        return self.model.layers[layer].cuts(part, self.num_shards, self.granularity)[self.index]

    @cached_property
    def working_starts(self) -> tuple[int, ...]:
        """First element of each layer in the working copies that these shards write in memory."""
        return self.model.starts_among(self._working_layers)

    @property
    def working_size(self) -> int:
        """Elements of those working copies."""
        return self.model.size_among(self._working_layers)

    @property
    def _working_layers(self) -> Set[int] | None:
        if not self.on_disk:
            return self.layers
        return (frozenset(range(len(self.model.layers))) if self.layers is None else self.layers) - self.on_disk

    @cached_property
    def filled(self) -> frozenset[int]:
        """The layers that have first values of their own: where memory is aliased, none whose place another one has."""
        return self.model.first_among(self.layers)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First element of each layer's part in this shard's state, of those that do not spill."""
        return starts_of(self._in_memory(self.spans), self._aliased_size)

    @cached_property
    def v_spans(self) -> tuple[Span, ...]:
        """Of `spans` what has a second moment."""
        stops = [layer.adamw.stop for layer in self.model.layers]
        return tuple(
            Span(min(span.start, stop), min(span.stop, stop)) for span, stop in zip(self.spans, stops, strict=True)
        )

    @cached_property
    def v_starts(self) -> tuple[int, ...]:
        """First element of each layer's part among the shard's second moments, of those that do not spill."""
        return starts_of(self._in_memory(self.v_spans), self._aliased_size)

    def _in_memory(self, spans: Sequence[Span]) -> list[int]:
        """Their sizes in the shard's state."""
        return [0 if i in self.spilled else span.size for i, span in enumerate(spans)]

    def _held(self, spans: Sequence[Span]) -> int:
        """What they take together."""
        size = sum(self._in_memory(spans))
        return size if self._aliased_size is None else min(size, self._aliased_size)

    @cached_property
    def _aliased_size(self) -> int | None:
        """The shard's part of the layout's; at least the largest layer's."""
        if self.model.aliased_size is None:
            return None
        share = round_up(self.model.aliased_size // self.num_shards, CUT_ELEMENTS)
        return max(share, *(span.size for span in self.spans))

    def span_of(self, layer: int, kind: str) -> Span:
        """What the shard has of a layer's state of one kind, in padded coordinates of the layer."""
        return (self.v_spans if kind == "v" else self.spans)[layer]

    @property
    def size(self) -> int:
        return self._held(self.spans)

    def size_of(self, kind: str) -> int:
        """Padded elements of one kind of the shard's state."""
        return self._held(self.v_spans) if kind == "v" else self.size

    def num_bytes(self, kinds: Iterable[tuple[str, torch.dtype]]) -> int:
        """Of the shard's state of these kinds."""
        return sum(self.size_of(kind) * dtype.itemsize for kind, dtype in kinds)

    def slice(self, layer: int) -> slice:
        """Where layer `layer`'s part lies in this shard's state (elements)."""
        return slice(self.starts[layer], self.starts[layer] + self.spans[layer].size)
