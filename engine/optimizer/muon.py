"""Computes Muon's updates: a matrix moves by its momentum, orthogonalised. Bit-equal to `torch.optim.Muon`.

    m ← lerp(m, g, 1 - μ)      u = lerp(g, m, μ), or m without Nesterov's look-ahead      O = NewtonSchulz(u)
    p ← p·(1 - lr·decay) - lr·r·O        r: factor of the learning rate, from the matrix's shape

The *direction* O needs whole matrices and many products. So the device that computes layers makes it, from gradient and
momentum. The shard updates m and p, element by element. In a stack of matrices (experts), each matrix is treated by
itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange, FlatLayout
from megatrain_ray.engine.layout.model_layout import ModelLayout

# https://kellerjordan.github.io/posts/muon/: coefficients of the quintic, and the least norm to divide by.
A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7


class LrAdjustment(Enum):
    """Says how a matrix's shape changes its learning rate. The names are torch's."""

    MATCH_RMS_ADAMW = "match_rms_adamw"  # factor 0.2·√max(rows, columns): an update is as large as one of AdamW's
    ORIGINAL = "original"  # factor √max(1, rows/columns)

    def ratio(self, shape: tuple[int, ...]) -> float:
        rows, columns = shape[-2:]
        if self is LrAdjustment.ORIGINAL:
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


@dataclass(frozen=True)
class Muon:
    """Holds Muon's constants, as `torch.optim.Muon` takes them."""

    momentum: float
    nesterov: bool
    ns_steps: int
    adjust_lr: LrAdjustment


def matrices(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return views of the matrices of a parameter, one after another: `values` (1-D) as [matrix, row, column]."""
    return values.view(-1, *shape[-2:])


def direction(gradient: Tensor, momentum: Tensor, scale: float, muon: Muon) -> Tensor:
    """Return the direction O of one matrix, in bf16.

    gradient: bf16 or fp32; only read.
    momentum: fp32, m before the update. It must be a copy, because it is overwritten with m after the update.
    scale: multiplies the gradient.
    """
    g = gradient.float()
    g = g * scale if g is gradient else g.mul_(scale)
    momentum.lerp_(g, 1 - muon.momentum)
    return newton_schulz(g.lerp_(momentum, muon.momentum) if muon.nesterov else momentum, muon.ns_steps)


def newton_schulz(update: Tensor, num_steps: int) -> Tensor:
    """Bring the singular values of a matrix near 1 by torch.optim.Muon's iteration; return the result, in bf16."""
    x = update.bfloat16()
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=EPS))
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x


def step_flops(shape: tuple[int, ...]) -> int:
    """Return the FLOPs of one step of `newton_schulz`, for a matrix of this shape or for each of a stack."""
    rows, columns = sorted(shape[-2:])
    return 4 * rows**2 * columns + 2 * rows**3


def work_bytes(shape: tuple[int, ...]) -> int:
    """Return the most bytes that `direction` holds beside its arguments."""
    rows, columns = shape[-2:]
    # g in FP32, x before and after a step, and two square matrices.
    return (4 + 2 + 2) * rows * columns + 2 * 2 * min(rows, columns) ** 2


class MatrixPart(NamedTuple):
    """Describes one rank's part of a layer's trained elements."""

    span: ElementRange  # in padded coordinates
    flops: int  # of one Newton-Schulz step of its matrices


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
