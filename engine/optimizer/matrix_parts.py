"""Which rank makes the directions of which matrices: its part of a layer that Muon trains something of. Pure.

A part is contiguous and cut between matrices, or between those of a stack: whoever has it needs no other rank's
gradient, momentum or direction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from megatrain_ray.engine.layout.flat_layout import FlatLayout, Span
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.optimizer.muon import step_flops


class MatrixPart(NamedTuple):
    """Of what is trained of a layer, in padded coordinates. `flops`: of a Newton-Schulz step of its matrices."""

    span: Span
    flops: int


class _Cut(NamedTuple):
    """Where a part may end, and the work before it."""

    padded: int
    flops: int


def matrix_parts(layer: FlatLayout, num_ranks: int) -> tuple[MatrixPart, ...]:
    """One for each rank, in the order of the layer: cuts are those next to equal work. What AdamW trains is the first
    one's. Parts may be empty: a matrix is one rank's."""
    shapes = tuple((segment.start, segment.shape) for segment in layer.muon_segments)
    return _parts(shapes, layer.trained.stop, num_ranks)


@cache  # of layers that are alike, and of every plan that is tried
def _parts(matrices: tuple[tuple[int, tuple[int, ...]], ...], size: int, num_ranks: int) -> tuple[MatrixPart, ...]:
    cuts = list(_cuts(matrices, size))
    total = cuts[-1].flops
    edges = [_Cut(0, 0)]
    for k in range(1, num_ranks):
        edges.append(min(cuts, key=lambda cut, k=k: abs(cut.flops * num_ranks - total * k)))  # type: ignore[misc]
    edges.append(cuts[-1])
    return tuple(MatrixPart(Span(a.padded, b.padded), b.flops - a.flops) for a, b in itertools.pairwise(edges))


def largest_part(layer: FlatLayout, num_ranks: int) -> int:
    """Elements of the largest of these parts."""
    return max(part.span.size for part in matrix_parts(layer, num_ranks))


def _cuts(matrices: tuple[tuple[int, tuple[int, ...]], ...], size: int) -> Iterator[_Cut]:
    """Before each matrix, and behind the last."""
    flops = 0
    for start, shape in matrices:
        rows, columns = shape[-2:]
        for k in range(shape[0] if len(shape) > 2 else 1):
            yield _Cut(start + k * rows * columns, flops)
            flops += step_flops(shape)
    yield _Cut(size, flops)


def matrix_spans(layout: ModelLayout, num_ranks: int) -> Mapping[int, tuple[Span, ...]]:
    """The part of every rank, by rank, of each layer that Muon trains something of. Where parts of a layer are not
    equal, the largest is that of the rank which has the least of the layers before: in sum all have about as much."""
    had = [0] * num_ranks
    found = {}
    for layer in layout.with_muon:
        parts = sorted(matrix_parts(layout.layers[layer], num_ranks), key=lambda part: -part.flops)
        spans = [Span(0, 0)] * num_ranks
        for rank, part in zip(sorted(range(num_ranks), key=lambda rank: had[rank]), parts, strict=True):
            had[rank] += part.flops
            spans[rank] = part.span
        found[layer] = tuple(spans)
    return found
