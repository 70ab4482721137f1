"""Makes linear modules of plain PyTorch multiply in FP8 as train.compute: fp8 promises, written down once more."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def with_fp8(layers: nn.Module) -> None:
    """Change the forward and backward of the linear modules in a list of layers.

    Thin ones, and those whose sides are no multiples of 16, stay as they are.
    """
    for linear in layers.modules():
        if isinstance(linear, nn.Linear):
            rows, columns = linear.weight.shape
            if rows % 16 == columns % 16 == 0 and max(rows, columns) < 16 * min(rows, columns):
                linear.forward = _Forward(linear)


class _Forward:
    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = _Multiply.apply(x, self._linear.weight)
        return y if self._linear.bias is None else y + self._linear.bias


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        tokens, given = gradient.flatten(0, -2), x.flatten(0, -2)
        of_x = product(tokens, weight.T).view_as(x)
        pad = (0, -len(given) % 16)
        return of_x, product(F.pad(tokens.T, pad), F.pad(given.T, pad))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ with every row of both in FP8."""
    (a8, a_scale), (b8, b_scale) = in_fp8(a), in_fp8(b)
    return torch._scaled_mm(a8, b8.T, a_scale, b_scale.T, out_dtype=torch.bfloat16)


def in_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8, and what each of its rows was divided by, [M, 1]."""
    largest = matrix.float().abs().max(dim=1, keepdim=True).values
    scale = torch.clamp(largest / 448, min=2.0**-100)
    return (matrix.float() / scale).to(torch.float8_e4m3fn).contiguous(), scale
