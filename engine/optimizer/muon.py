"""Computes Muon's updates: a matrix moves by its momentum, orthogonalised. Bit-equal to `torch.optim.Muon`.

    m ← lerp(m, g, 1 - μ)      u = lerp(g, m, μ), or m without Nesterov's look-ahead      O = NewtonSchulz(u)
    p ← p·(1 - lr·decay) - lr·r·O        r: factor of the learning rate, from the matrix's shape

The *direction* O needs whole matrices and many products. So the device that computes layers makes it, from gradient and
momentum. The shard updates m and p, element by element. In a stack of matrices (experts), each matrix is treated by
itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

# https://kellerjordan.github.io/posts/muon/: coefficients of the quintic, and the least norm to divide by.
A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7


class LrAdjustment(Enum):
    """Says how a matrix's shape changes its learning rate. The names are torch's.

    MATCH_RMS_ADAMW: factor 0.2·√max(rows, columns), so that an update is as large as one of AdamW's.

    ORIGINAL: factor √max(1, rows/columns).
    """

    MATCH_RMS_ADAMW = "match_rms_adamw"
    ORIGINAL = "original"

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


def matrices(values: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield a matrix, or each matrix of a stack, as a view.

    values: elements of the parameter, 1-D.
    shape: of the parameter.
    """
    yield from values.view(-1, *shape[-2:])


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
    """Bring the singular values of a matrix near 1 and return the result, in bf16.

    The iteration is that of torch.optim.Muon.
    """
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
    """Return the most bytes that `direction` holds beside its arguments.

    They are g in FP32, x before and after a step, and two square matrices.
    """
    rows, columns = shape[-2:]
    return (4 + 2 + 2) * rows * columns + 2 * 2 * min(rows, columns) ** 2
