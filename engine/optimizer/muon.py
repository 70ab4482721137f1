"""Muon: a matrix is moved by its momentum, orthogonalised. The arithmetic of `torch.optim.Muon`, bit for bit.

    m ← lerp(m, g, 1 - μ)      u = lerp(g, m, μ), or m without Nesterov's look ahead      O = NewtonSchulz(u)
    p ← p·(1 - lr·decay) - lr·r·O        r: what the matrix's shape makes of the learning rate

The *direction* O needs whole matrices and many products, so the device that computes layers makes it, from gradient
and momentum; m and p are the shard's, element by element. Stacks of matrices (experts) are matrices one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

# https://kellerjordan.github.io/posts/muon/: coefficients of the quintic, and what keeps a norm from zero.
A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7


class LrAdjustment(Enum):
    """How a matrix's shape changes its learning rate, by torch's names. MATCH_RMS_ADAMW: 0.2·√max(rows, columns), so
    that an update is as large as one of AdamW's. ORIGINAL: √max(1, rows/columns)."""

    MATCH_RMS_ADAMW = "match_rms_adamw"
    ORIGINAL = "original"

    def ratio(self, shape: tuple[int, ...]) -> float:
        """Of a matrix, or of each one of a stack."""
        rows, columns = shape[-2:]
        if self is LrAdjustment.ORIGINAL:
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


@dataclass(frozen=True)
class Muon:
    """Muon's constants, as `torch.optim.Muon` takes them."""

    momentum: float
    nesterov: bool
    ns_steps: int
    adjust_lr: LrAdjustment


def matrices(values: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Views of a matrix, or of those of a stack. `values`: theirs, 1-D. `shape`: of the parameter."""
    yield from values.view(-1, *shape[-2:])


def direction(gradient: Tensor, momentum: Tensor, scale: float, muon: Muon) -> Tensor:
    """O of one matrix, bf16. `gradient`: bf16 or fp32, is only read. `momentum`: fp32, m before the update, a copy of
    its own: it becomes m after it."""
    g = gradient.float()
    g = g * scale if g is gradient else g.mul_(scale)
    momentum.lerp_(g, 1 - muon.momentum)
    return newton_schulz(g.lerp_(momentum, muon.momentum) if muon.nesterov else momentum, muon.ns_steps)


def newton_schulz(update: Tensor, num_steps: int) -> Tensor:
    """A matrix whose singular values are brought near 1, in bf16: the iteration of torch.optim.Muon."""
    x = update.bfloat16()
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=EPS))
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x


def step_flops(shape: tuple[int, ...]) -> int:
    """Of the products of a step of `newton_schulz`, for a matrix, or for one of a stack."""
    rows, columns = sorted(shape[-2:])
    return 4 * rows**2 * columns + 2 * rows**3


def work_bytes(shape: tuple[int, ...]) -> int:
    """What `direction` holds at most beside what it is given: g in FP32, x before and after a step, two square ones."""
    rows, columns = shape[-2:]
    return (4 + 2 + 2) * rows * columns + 2 * 2 * min(rows, columns) ** 2
