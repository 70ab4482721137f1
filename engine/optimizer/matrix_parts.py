"""Divides the matrices that Muon trains among the ranks, each of which makes the directions of its own. Pure.

A rank's part of a layer is contiguous. It is cut between matrices, or between the matrices of a stack. So a rank needs
no other rank's gradient, momentum or direction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from megatrain_ray.engine.layout.flat_layout import ElementRange, FlatLayout
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.optimizer.muon import step_flops


class MatrixPart(NamedTuple):
    """Describes one rank's part of a layer's trained elements.

    span: in padded coordinates.
    flops: of one Newton-Schulz step of its matrices.
    """

    span: ElementRange
    flops: int


class _CutPoint(NamedTuple):
    """Describes where a part may end."""

    padded: int
    flops: int  # work of all matrices before it


def matrix_parts(layer: FlatLayout, num_ranks: int) -> tuple[MatrixPart, ...]:
    """Return one part for each rank, in the order of the layer. Cuts are those nearest to equal work.

    What AdamW trains belongs to the first rank's part. Parts may be empty, since a matrix belongs to one rank.
    """
    shapes = tuple((segment.start, segment.shape) for segment in layer.muon_segments)
    return _parts(shapes, layer.trained.stop, num_ranks)


@cache  # shared by layers that are alike, and by all plans that are tried
def _parts(matrices: tuple[tuple[int, tuple[int, ...]], ...], size: int, num_ranks: int) -> tuple[MatrixPart, ...]:
    cuts = list(_cuts(matrices, size))
    total = cuts[-1].flops
    edges = [_CutPoint(0, 0)]
    for k in range(1, num_ranks):
        edges.append(min(cuts, key=lambda cut, k=k: abs(cut.flops * num_ranks - total * k)))  # type: ignore[misc]
    edges.append(cuts[-1])
    return tuple(MatrixPart(ElementRange(a.padded, b.padded), b.flops - a.flops) for a, b in itertools.pairwise(edges))


def largest_part(layer: FlatLayout, num_ranks: int) -> int:
    return max(part.span.size for part in matrix_parts(layer, num_ranks))


def _cuts(matrices: tuple[tuple[int, tuple[int, ...]], ...], size: int) -> Iterator[_CutPoint]:
    flops = 0
    for start, shape in matrices:
        rows, columns = shape[-2:]
        for k in range(shape[0] if len(shape) > 2 else 1):
            yield _CutPoint(start + k * rows * columns, flops)
            flops += step_flops(shape)
    yield _CutPoint(size, flops)


def matrix_spans(layout: ModelLayout, num_ranks: int) -> Mapping[int, tuple[ElementRange, ...]]:
    """Return every rank's part, by rank, of each layer of which Muon trains something.

    If the parts of a layer are not equal, the largest goes to the rank that has the least work in the layers before. So
    all ranks have about the same work in sum.
    """
    had = [0] * num_ranks
    found = {}
    for layer in layout.with_muon:
        parts = sorted(matrix_parts(layout.layers[layer], num_ranks), key=lambda part: -part.flops)
        spans = [ElementRange(0, 0)] * num_ranks
        for rank, part in zip(sorted(range(num_ranks), key=lambda rank: had[rank]), parts, strict=True):
            had[rank] += part.flops
            spans[rank] = part.span
        found[layer] = tuple(spans)
    return found
