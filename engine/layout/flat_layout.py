"""Lays out a layer's parameters (or gradients) as one 1-D buffer, its flat. FlatLayout is the only owner of offsets.

There are two coordinate systems, both counted in elements. *Padded*: where an element lies in a flat, with every
parameter aligned. *Logical*: the same elements without padding. Saves use logical coordinates, so they restore onto any
number of shards.

    parameters that AdamW trains | parameters that Muon trains | parameters that are frozen | wide copies

Gradients and optimizer state exist only for the trained parts, at the same coordinates. AdamW's second moment exists
only for the first part.

A model may read some parameters in FP32 while the others stream as bf16. The FP32 values of such a parameter are its
*wide copy*, and take two elements of a bf16 flat each. A frozen parameter has only its wide copy. A trained one also
has a working copy in the trained part, as every other, so that its master is split and updated as every other. After
each update the wide copy is set to the master. Logical coordinates count values, and no wide copies of trained
parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from megatrain_ray.engine.layout.expert_names import PlaceInWhole, place_in_whole
from megatrain_ray.io.checkpoints.weight_map import row_major


@dataclass(frozen=True)
class ParameterGroup:
    """Describes how the parameters of a group are trained."""

    trained: bool = True
    lr_scale: float = 1.0  # factor on the learning rate of the step
    weight_decay: float | None = None  # None: the run's weight decay, if the parameter decays at all
    muon: bool | None = None  # whether Muon trains it; None: as the run's optimizer says


COMMON = ParameterGroup()
FROZEN = ParameterGroup(trained=False)


ALIGN_ELEMENTS = 128  # 256 bytes of a two-byte type: coalesced loads, and every cut below stays on a vector boundary
CUT_ELEMENTS = 2048  # 4096 bytes of a two-byte type: O_DIRECT- and page-safe for every state class
WIDE = 2  # elements of a flat that an FP32 value takes, where a working copy has two bytes
NODE_CUT_ELEMENTS = 1 << 20  # 2 MiB of a two-byte type: a huge page is never shared by two NUMA nodes


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def starts_of(sizes: Iterable[int], aliased_size: int | None = None) -> tuple[int, ...]:
    """Return where each item begins if items of these sizes lie one after the other.

    aliased_size: start again from 0 whenever the next item would end beyond this; None: never.
    """
    if aliased_size is None:
        return tuple(itertools.accumulate(sizes, initial=0))[:-1]
    starts, position = [], 0
    for size in sizes:
        start = position if position + size <= aliased_size else 0
        starts.append(start)
        position = start + size
    return tuple(starts)


class ElementRange(NamedTuple):
    """Represents a half-open range of elements or bytes."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ParameterSpec:
    """Describes a parameter for a layout.

    A tied parameter owns no elements: `tied_to` names the parameter that does.
    """

    name: str  # in the model: model.layers.3.self_attn.q_proj.weight
    local: str  # in the layer's template: self_attn.q_proj.weight
    shape: tuple[int, ...]
    decay: bool = True
    tied_to: str | None = None
    group: ParameterGroup = COMMON  # a tied parameter has the group of its owner
    muon: bool = False  # whether Muon trains it; then it is a matrix or a stack of matrices
    fp32: bool = False  # whether the model reads it in FP32 while the others stream as bf16


@dataclass(frozen=True)
class Segment(ParameterSpec):
    """Describes one parameter inside a flat, from the padded coordinate `start` on."""

    start: int = 0
    wide_start: int | None = None  # where its wide copy begins, if it has one

    @property
    def numel(self) -> int:
        return 0 if self.tied_to else math.prod(self.shape)

    @property
    def width(self) -> int:
        """Return how many elements of the flat a value takes from `start` on."""
        return WIDE if self.fp32 and not self.group.trained else 1

    @property
    def stop(self) -> int:
        return self.start + self.numel * self.width

    @property
    def read_start(self) -> int:
        """Return where the values begin that the model reads."""
        return self.start if self.wide_start is None else self.wide_start

    def read_view(self, flat: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return the values that the model reads as a view of `flat`: 1-D, working copies from element `start` on."""
        first = self.read_start - start
        if self.wide_start is None:
            return flat[first : first + self.numel].view(self.shape)
        return flat[first : first + WIDE * self.numel].view(torch.float32).view(self.shape)


class ParamRun(NamedTuple):
    """Represents consecutive values of one parameter, by the first one in three coordinates, and their number."""

    segment: Segment
    padded: int
    logical: int
    in_segment: int  # counted from the parameter's first value
    length: int

    @property
    def in_whole(self) -> PlaceInWhole:
        whole = place_in_whole(self.segment.name, self.segment.shape)
        return PlaceInWhole(whole.name, whole.start + self.in_segment)


@dataclass(frozen=True)
class FlatLayout:
    """Describes a layer's flat: what AdamW trains, then what Muon trains, then what is frozen, then wide copies.

    Parameters are aligned, and in model order within each part; frozen ones with wide copies come after the other
    frozen ones. The padded size of each part is a multiple of CUT_ELEMENTS.
    """

    name: str
    segments: tuple[Segment, ...]
    fragments: tuple[ElementRange, ...]  # uploaded separately; together they cover the flat
    adamw: ElementRange  # the first part
    trained: ElementRange  # the first two parts
    frozen: ElementRange
    wide: ElementRange  # wide copies of trained parameters, in the order of these

    @staticmethod
    def build(name: str, parameters: Sequence[ParameterSpec], num_fragments: int = 1) -> FlatLayout:
        segments: list[Segment] = []
        ends, position = [], 0
        trained = [p for p in parameters if p.group.trained]
        by_adamw, by_muon = [p for p in trained if not p.muon], [p for p in trained if p.muon]
        frozen = sorted((p for p in parameters if not p.group.trained), key=lambda p: p.fp32)
        for of_part in (by_adamw, by_muon, frozen):
            for p in of_part:
                wide_start = position if p.fp32 and not p.group.trained else None
                segments.append(Segment(**vars(p), start=position, wide_start=wide_start))
                position = round_up(segments[-1].stop, ALIGN_ELEMENTS)
            position = round_up(position, CUT_ELEMENTS)
            ends.append(position)
        for i, s in enumerate(segments):
            if s.fp32 and s.group.trained and not s.tied_to:
                segments[i] = replace(s, wide_start=position)
                position = round_up(position + WIDE * s.numel, ALIGN_ELEMENTS)
        adamw_end, trained_end, frozen_end = ends
        size = round_up(position, CUT_ELEMENTS)
        return FlatLayout(
            name,
            tuple(segments),
            _fragments(segments, size, num_fragments),
            adamw=ElementRange(0, adamw_end),
            trained=ElementRange(0, trained_end),
            frozen=ElementRange(trained_end, frozen_end),
            wide=ElementRange(frozen_end, size),
        )

    @cached_property
    def size(self) -> int:
        return self.fragments[-1].stop

    @property
    def parts(self) -> tuple[ElementRange, ElementRange]:
        return self.trained, self.frozen

    @cached_property
    def logical_size(self) -> int:
        return sum(s.numel for s in self.segments)

    @cached_property
    def num_trained(self) -> int:
        """Return the number of trained elements. They are the first ones in logical coordinates."""
        return sum(s.numel for s in self.trained_segments)

    @cached_property
    def num_muon(self) -> int:
        """Return the number of elements that Muon trains. They are the last of the trained ones."""
        return sum(s.numel for s in self.muon_segments)

    @cached_property
    def num_frozen_fp32(self) -> int:
        """Return the number of elements that are not trained and have a wide copy."""
        return sum(s.numel for s in self.owned if s.fp32 and not s.group.trained)

    @cached_property
    def trained_segments(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.owned if s.group.trained)

    @cached_property
    def muon_segments(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.trained_segments if s.muon)

    @cached_property
    def wide_segments(self) -> tuple[Segment, ...]:
        """Return the trained segments that have a wide copy."""
        return tuple(s for s in self.trained_segments if s.fp32)

    @cached_property
    def owned(self) -> tuple[Segment, ...]:  # all except the tied ones, which hold no elements
        return tuple(s for s in self.segments if not s.tied_to)

    @cached_property
    def _by_name(self) -> Mapping[str, Segment]:
        return {s.name: s for s in self.segments}

    def segment(self, name: str) -> Segment:
        return self._by_name[name]

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """Return the parameter `name` as a view of `flat` (1-D, `size` elements of any type).

        A frozen parameter with a wide copy, which `flat` must then have, is returned in FP32.
        """
        segment = self._by_name[name]
        values = flat[segment.start : segment.stop]
        return (values if segment.width == 1 else values.view(torch.float32)).view(segment.shape)

    def trained_views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of `flat` (1-D, padded) for all trained parameters, by name."""
        # 12 parameters take 11 µs, and 24 µs with one `view` after the other.
        start = flat.storage_offset()
        return {name: flat.as_strided(*geometry, start + offset) for name, geometry, offset in self._geometries}

    @cached_property
    def _geometries(self) -> tuple[tuple[str, tuple[tuple[int, ...], tuple[int, ...]], int], ...]:
        """Return name, (shape, strides) and first element of each trained segment."""
        return tuple((s.name, (s.shape, row_major(s.shape)), s.start) for s in self.trained_segments)

    def cuts(self, part: ElementRange, num_shards: int, granularity: int = CUT_ELEMENTS) -> tuple[ElementRange, ...]:
        """Return one contiguous span per shard; together they cover `part`.

        Cuts are multiples of 64 elements from the start of every parameter, so that torch's vectorised AdamW rounds
        each shard's part as it rounds the whole tensor. A shard of a small layer may get an empty span.

        part: span of the layer (`trained` or `frozen`).
        granularity: cuts are at multiples of so many elements from the start of `part`.
        """
        units = math.ceil(part.size / granularity)
        offsets = [min(part.size, units * k // num_shards * granularity) for k in range(num_shards)] + [part.size]
        return tuple(ElementRange(part.start + a, part.start + b) for a, b in itertools.pairwise(offsets))

    def wide_of(self, span: ElementRange) -> ElementRange:
        """Return where the wide copies of a span of the trained part lie.

        Those of spans that cover the trained part cover `wide`.
        """
        return ElementRange(self._wide_position(span.start), self._wide_position(span.stop))

    def _wide_position(self, padded: int) -> int:
        for s in self.wide_segments:
            if padded < s.stop:
                return s.read_start + WIDE * max(0, padded - s.start)
        return self.wide.stop

    def runs(self, span: ElementRange) -> Iterator[ParamRun]:
        """Yield the runs of parameters inside a span of the trained or the frozen part, in order, without padding."""
        logical = 0
        for s in self.owned:
            start, stop = max(s.start, span.start), min(s.stop, span.stop)
            if start < stop:
                before = (start - s.start) // s.width
                yield ParamRun(s, start, logical + before, before, (stop - start) // s.width)
            logical += s.numel

    def logical(self, span: ElementRange) -> ElementRange:
        return ElementRange(self._logical_position(span.start), self._logical_position(span.stop))

    def _logical_position(self, padded: int) -> int:
        return sum(max(0, min(s.stop, padded) - s.start) // s.width for s in self.owned)


def _fragments(segments: Sequence[Segment], size: int, num_fragments: int) -> tuple[ElementRange, ...]:
    """Return fragments that are cut at the parameter boundaries nearest to equal parts.

    There are fewer than `num_fragments` if there are fewer parameters.
    """
    starts = sorted({s.start for s in segments if s.numel and s.start})
    edges = [0]
    for k in range(1, num_fragments):
        later = [s for s in starts if s > edges[-1]]
        if later:
            edges.append(min(later, key=lambda s, k=k: abs(s - size * k // num_fragments)))  # type: ignore[misc]
    edges.append(size)
    return tuple(ElementRange(a, b) for a, b in itertools.pairwise(edges))
