"""FlatLayout: the only owner of byte offsets. A layer's parameters (or gradients) as one 1-D buffer.

Two coordinate systems, both counted in elements. *Padded*: where an element lies in a flat, with every parameter
aligned. *Logical*: the same elements without padding; saves use it, so that they restore onto any number of shards.

    parameters that AdamW trains | parameters that Muon trains | parameters that are frozen

Gradients and optimizer state exist for what is trained only, at the same coordinates; AdamW's second moment for the
first part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from megatrain_ray.engine.layout.expert_names import PlaceInWhole, place_in_whole
from megatrain_ray.engine.layout.parameter_group import COMMON, ParameterGroup

ALIGN_ELEMENTS = 128  # 256 bytes of a two-byte type: coalesced loads, and every cut below stays on a vector boundary
CUT_ELEMENTS = 2048  # 4096 bytes of a two-byte type: O_DIRECT- and page-safe for every state class
NODE_CUT_ELEMENTS = 1 << 20  # 2 MiB of a two-byte type: a huge page is never shared by two NUMA nodes


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def starts_of(sizes: Iterable[int], aliased_size: int | None = None) -> tuple[int, ...]:
    """Where each of these begins when they lie one after the other; with `aliased_size`, from the beginning again
    whenever the next one would end beyond that."""
    if aliased_size is None:
        return tuple(itertools.accumulate(sizes, initial=0))[:-1]
    starts, position = [], 0
    for size in sizes:
        start = position if position + size <= aliased_size else 0
        starts.append(start)
        position = start + size
    return tuple(starts)


class Span(NamedTuple):
    """A half-open range of elements."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Segment:
    """One parameter inside a flat. A tied parameter owns no elements here: `tied_to` names the one that does."""

    name: str  # in the model: model.layers.3.self_attn.q_proj.weight
    local: str  # in the layer's template: self_attn.q_proj.weight
    shape: tuple[int, ...]
    start: int  # padded coordinate
    decay: bool
    tied_to: str | None = None
    group: ParameterGroup = COMMON  # a tied one's is its owner's
    muon: bool = False  # trained by Muon: a matrix, or a stack of them

    @property
    def numel(self) -> int:
        return 0 if self.tied_to else math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


class Run(NamedTuple):
    """Elements of one parameter that lie together: `length` of them, at these three coordinates."""

    segment: Segment
    padded: int
    logical: int
    in_segment: int
    length: int

    @property
    def in_whole(self) -> PlaceInWhole:
        """Where its elements lie in the parameter that a checkpoint knows."""
        whole = place_in_whole(self.segment.name, self.segment.shape)
        return PlaceInWhole(whole.name, whole.start + self.in_segment)


@dataclass(frozen=True)
class ParameterSpec:
    """What a layout needs to know of a parameter."""

    name: str
    local: str
    shape: tuple[int, ...]
    decay: bool = True
    tied_to: str | None = None
    group: ParameterGroup = COMMON
    muon: bool = False


@dataclass(frozen=True)
class FlatLayout:
    """One layer: what AdamW trains in model order, then what Muon trains, then what is frozen, aligned; the padded size
    of each part is a multiple of CUT_ELEMENTS. `trained`: the first two."""

    name: str
    segments: tuple[Segment, ...]
    fragments: tuple[Span, ...]
    adamw: Span
    trained: Span
    frozen: Span

    @staticmethod
    def build(name: str, parameters: Sequence[ParameterSpec], num_fragments: int = 1) -> FlatLayout:
        trained = [p for p in parameters if p.group.trained]
        adamw = _place([p for p in trained if not p.muon], 0)
        first_muon = _end(adamw, 0)
        muon = _place([p for p in trained if p.muon], first_muon)
        cut = _end(muon, first_muon)
        frozen = _place([p for p in parameters if not p.group.trained], cut)
        size = _end(frozen, cut)
        segments = (*adamw, *muon, *frozen)
        fragments = _fragments(segments, size, num_fragments)
        return FlatLayout(name, segments, fragments, Span(0, first_muon), Span(0, cut), Span(cut, size))

    @cached_property
    def size(self) -> int:
        """Padded elements."""
        return self.fragments[-1].stop

    @property
    def parts(self) -> tuple[Span, Span]:
        """What is trained, and what is frozen."""
        return self.trained, self.frozen

    @cached_property
    def logical_size(self) -> int:
        return sum(s.numel for s in self.segments)

    @cached_property
    def num_trained(self) -> int:
        """Elements that are trained: the first ones in logical coordinates."""
        return sum(s.numel for s in self.trained_segments)

    @cached_property
    def num_muon(self) -> int:
        """Elements that Muon trains: the last ones of the trained ones."""
        return sum(s.numel for s in self.muon_segments)

    @cached_property
    def trained_segments(self) -> tuple[Segment, ...]:
        """Of `owned`."""
        return tuple(s for s in self.owned if s.group.trained)

    @cached_property
    def muon_segments(self) -> tuple[Segment, ...]:
        """Of `trained_segments`."""
        return tuple(s for s in self.trained_segments if s.muon)

    @cached_property
    def owned(self) -> tuple[Segment, ...]:
        """The segments that hold elements: all but the tied ones."""
        return tuple(s for s in self.segments if not s.tied_to)

    @cached_property
    def _by_name(self) -> Mapping[str, Segment]:
        return {s.name: s for s in self.segments}

    def segment(self, name: str) -> Segment:
        """Raises KeyError for a name that is not of this layer."""
        return self._by_name[name]

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The parameter `name` as a view of `flat` (1-D, `size` elements of any type)."""
        segment = self._by_name[name]
        return flat[segment.start : segment.stop].view(segment.shape)

    def trained_views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same of all that is trained, by name: 12 parameters in 11 µs where one after the other takes 24."""
        start = flat.storage_offset()
        return {name: flat.as_strided(*geometry, start + offset) for name, geometry, offset in self._geometries}

    @cached_property
    def _geometries(self) -> tuple[tuple[str, tuple[tuple[int, ...], tuple[int, ...]], int], ...]:
        """Name, shape and strides, first element of what is trained."""
        return tuple((s.name, (s.shape, _strides(s.shape)), s.start) for s in self.trained_segments)

    def cuts(self, part: Span, num_shards: int, granularity: int = CUT_ELEMENTS) -> tuple[Span, ...]:
        """One contiguous span a shard, cut at multiples of `granularity` elements from the start of the part of the
        layer (`trained` or `frozen`); together they cover it.

        Cuts are multiples of 64 elements from the start of every parameter, so that torch's vectorised AdamW rounds
        each shard's part as it rounds the whole tensor. A shard of a small layer may get an empty span.
        """
        units = math.ceil(part.size / granularity)
        offsets = [min(part.size, units * k // num_shards * granularity) for k in range(num_shards)] + [part.size]
        return tuple(Span(part.start + a, part.start + b) for a, b in itertools.pairwise(offsets))

    def runs(self, span: Span) -> Iterator[Run]:
        """The parts of parameters inside a padded span, in order; padding is left out."""
        logical = 0
        for s in self.owned:
            start, stop = max(s.start, span.start), min(s.stop, span.stop)
            if start < stop:
                yield Run(s, start, logical + start - s.start, start - s.start, stop - start)
            logical += s.numel

    def logical(self, span: Span) -> Span:
        """The logical span of a padded one."""
        return Span(self._logical_position(span.start), self._logical_position(span.stop))

    def _logical_position(self, padded: int) -> int:
        return sum(max(0, min(s.stop, padded) - s.start) for s in self.owned)


def _place(parameters: Sequence[ParameterSpec], position: int) -> list[Segment]:
    """One after the other from `position` on."""
    segments = []
    for p in parameters:
        segment = Segment(p.name, p.local, p.shape, position, p.decay, p.tied_to, p.group, p.muon)
        segments.append(segment)
        position = round_up(segment.stop, ALIGN_ELEMENTS)
    return segments


def _end(segments: Sequence[Segment], start: int) -> int:
    """Where a part that begins at `start` ends."""
    return round_up(max((s.stop for s in segments), default=start), CUT_ELEMENTS)


def _fragments(segments: Sequence[Segment], size: int, num_fragments: int) -> tuple[Span, ...]:
    """Cuts at parameter boundaries nearest to equal parts; fewer fragments where there are fewer parameters."""
    starts = sorted({s.start for s in segments if s.numel and s.start})
    edges = [0]
    for k in range(1, num_fragments):
        later = [s for s in starts if s > edges[-1]]
        if later:
            edges.append(min(later, key=lambda s, k=k: abs(s - size * k // num_fragments)))  # type: ignore[misc]
    edges.append(size)
    return tuple(Span(a, b) for a, b in itertools.pairwise(edges))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor without gaps, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
