"""Multiplies the matrices of a model's layers in FP8, with a scale for each row (train.compute: fp8).

A product contracts the rows of two matrices. Each row is divided by a scale, so that its largest element becomes the
largest number of e4m3, and rounded. The products of a pair of rows are summed in FP32, times both scales. GPUs may keep
fewer bits of a forward's sums. The recipe is `rowwise` of torchao, without its rounding of scales to powers of two:

    forward                     y  = x Wᵀ    a scale for each token of x, and for each output of W
    gradient of the input       dx = g W     for each token of g, and for each input of W
    gradient of the weight      dW = gᵀ x    for each output of g, and for each input of x, over all tokens

Results are bf16. Weights, gradients and what autograd keeps are those of an unchanged model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatrain_ray.engine.model.structure import ModelFactory
from megatrain_ray.errors import ConfigError

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
LEAST_SCALE = 2.0**-100  # of a row of zeros; rows of gradients have scales down to about 1e-14
ALIGNMENT = 16  # elements: the kernels of GPUs need rows of a multiple of it
Quantised = tuple[Tensor, Tensor]  # rows in FP8, and their scales
# A matrix with a side this many times as long as the other one stays in bf16: rounding its inputs to FP8 takes longer
# than the product saves. Routers have such matrices, and small errors change their choices.
THIN = 16


@dataclass(frozen=True)
class Fp8Factory:
    """Builds a model with `base` and makes the linear modules of its layers multiply in FP8. It is a ModelFactory.

    Only a bf16 model has such modules. Raises ConfigError if one has none.
    """

    base: ModelFactory

    def __call__(self, dtype: torch.dtype) -> nn.Module:
        model = self.base(dtype)
        if dtype != torch.bfloat16:
            return model
        found = [module for path, module in model.named_modules() if _is_large(path, module)]
        if not found:
            raise ConfigError(
                f"train.compute: fp8: the layers of {type(model).__name__} have no linear module whose sides are "
                f"multiples of {ALIGNMENT} and less than {THIN} times each other; leave the key out"
            )
        for module in found:
            module.__class__ = Fp8Linear
        return model


def fp8_weights(model: nn.Module) -> Iterator[str]:
    """Yield the names of the parameters that are multiplied in FP8."""
    return (f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Fp8Linear))


def fp8_problem(device: torch.device) -> str | None:
    """Return why FP8 products cannot be computed on a device; None: they can. Allocates a few bytes on it."""
    try:
        _multiply(*torch.ones(2, ALIGNMENT, ALIGNMENT, dtype=torch.bfloat16, device=device))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None


class Fp8Linear(nn.Linear):
    """Computes a linear module's forward and backward in FP8."""

    def forward(self, input: Tensor) -> Tensor:
        rows: Tensor = _Product.apply(input.reshape(-1, self.in_features), self.weight)  # type: ignore[no-untyped-call]
        output = rows.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


class _Product(torch.autograd.Function):
    """Multiplies inputs [T, in] with a weight [out, in]: [T, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        of_x, of_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return _multiply(x, weight, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = None if weight is None else _multiply(gradient, weight.t())
        return of_x, None if x is None else _multiply(_aligned(gradient.t()), _aligned(x.t()))


def _multiply(left: Tensor, right: Tensor, *, fast: bool = False) -> Tensor:
    """Return the product of the rows of `left` [M, K] with those of `right` [N, K]: [M, N] in bf16.

    fast: GPUs may keep fewer bits of the sums than FP32 has, as torchao lets them in a forward.
    """
    return multiply_quantised(quantised(left), quantised(right), fast=fast)


def multiply_quantised(left: Quantised, right: Quantised, *, fast: bool = False) -> Tensor:
    """Return the product of rows that are FP8 already. The arguments are as for `_multiply`."""
    (a, a_scale), (b, b_scale) = left, right
    return torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast)


def quantised(rows: Tensor) -> Quantised:
    """Return the rows in FP8, one after the other in memory, and their scales [M, 1]. A NaN or infinity gives NaN."""
    scale = (rows.abs().amax(-1, keepdim=True).float() / LARGEST).clamp(min=LEAST_SCALE)
    return (rows.float() / scale).to(FP8).contiguous(), scale


def _aligned(rows: Tensor) -> Tensor:
    """Return the rows, followed by as many zeros as their alignment needs; these change no product."""
    missing = -rows.shape[-1] % ALIGNMENT
    return F.pad(rows, (0, missing)) if missing else rows


def _is_large(path: str, module: nn.Module) -> bool:
    """Return whether a module's products gain from FP8, and its rows suit the kernels.

    It is in a list of layers, as heads are not, and no single expert.
    """
    if type(module) is not nn.Linear or ".experts." in path or not re.search(r"\.\d+\.", path):
        return False
    short, long = sorted(module.weight.shape)
    aligned = short % ALIGNMENT == 0 == long % ALIGNMENT
    return module.weight.dtype is torch.bfloat16 and aligned and long < THIN * short
