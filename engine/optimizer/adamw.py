"""Applies AdamW to blocks that stay in a core's cache.

One pass goes from gradient to residual, moments and working copy. It is bit-equal to `torch.optim.AdamW(fused=True)` on
whole FP32 tensors. torch rounds v differently in the scalar tail of a vector. So blocks are cut at multiples of 64
elements from a parameter's first one, and only the parameter's own tail is scalar.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import Span
from megatrain_ray.engine.layout.split_master import join_into, split_into
from megatrain_ray.engine.optimizer.muon import Muon
from megatrain_ray.engine.optimizer.stochastic_rounding import random_bits, round_into

BLOCK_ELEMENTS = 1 << 18  # a multiple of 64; what a block reads and writes is then about 6 MiB


@dataclass(frozen=True)
class Hyper:
    """Holds AdamW's constants, as `torch.optim.AdamW` takes them.

    weight_decay: of parameters that decay and whose group sets none of its own, including those that Muon trains.
    muon: Muon's constants, if it trains anything.
    moments_seed: seed of the random bits with which bf16 moments are rounded. None: moments are FP32, as Muon's
        momentum is.
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    muon: Muon | None = None
    moments_seed: int | None = None


class Rates(NamedTuple):
    """Holds what varies from update to update.

    step: AdamW's own step count from 1, as the FP32 scalar that torch takes.
    scale: multiplies gradients, an FP32 value.
    """

    step: Tensor
    lr: float
    scale: float


class Weighting(NamedTuple):
    """Holds what differs from parameter to parameter.

    lr_scale: multiplies the update's learning rate.
    lr_ratio: multiplies it as well where Muon moves the parameter, but not where it decays it.
    """

    lr_scale: float
    weight_decay: float
    lr_ratio: float = 1.0


class Coefficients(NamedTuple):
    """Holds torch's coefficients of one update, which are the same for all parameters.

    They are doubles; a kernel rounds them to FP32.
    """

    m_weight: float
    v_keep: float
    v_weight: float
    root: float  # square root of v's bias correction

    @classmethod
    def of(cls, hyper: Hyper, rates: Rates) -> Coefficients:
        root = math.sqrt(1 - hyper.beta2 ** rates.step.item())
        return cls(1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, root)


class Move(NamedTuple):
    """Holds how an update moves one parameter: it decays, then steps along m divided by the root of v.

    Both numbers are doubles; a kernel rounds them to FP32.
    """

    decay: float
    step_size: float

    @classmethod
    def of(cls, hyper: Hyper, rates: Rates, weighting: Weighting) -> Move:
        lr = rates.lr * weighting.lr_scale
        correction = float(1 - hyper.beta1 ** rates.step.item())
        return cls(1 - lr * weighting.weight_decay, -(lr / correction))


class AdamState(NamedTuple):
    """Holds some elements of one parameter, in 1-D tensors of equal length.

    working: bf16 if the master is split, else the FP32 master itself.
    residual: int16 if the master is split, else None.
    m, v: both fp32 or both bf16. v is None for a parameter that Muon trains.
    """

    working: Tensor
    residual: Tensor | None
    m: Tensor
    v: Tensor | None

    def cut(self, span: Span) -> AdamState:
        part = slice(*span)
        residual = None if self.residual is None else self.residual[part]
        return AdamState(self.working[part], residual, self.m[part], None if self.v is None else self.v[part])


class Scratch:
    """Holds one thread's buffers for a block, allocated once.

    thread: the thread's number, from 0.
    """

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.gradient = torch.empty(BLOCK_ELEMENTS, dtype=torch.float32)
        self.master = torch.empty(BLOCK_ELEMENTS, dtype=torch.float32)
        self.m = torch.empty(BLOCK_ELEMENTS, dtype=torch.float32)
        self.v = torch.empty(BLOCK_ELEMENTS, dtype=torch.float32)
        self.bits = torch.empty(BLOCK_ELEMENTS, dtype=torch.int32)
        self.random = torch.empty(BLOCK_ELEMENTS, dtype=torch.int32)
        self.random16 = torch.empty(BLOCK_ELEMENTS, dtype=torch.int32)


def adamw_block(
    state: AdamState,
    gradient: Tensor,
    hyper: Hyper,
    rates: Rates,
    weighting: Weighting,
    scratch: Scratch,
    counter: int = 0,
) -> None:
    """Update at most BLOCK_ELEMENTS elements of a parameter in place.

    gradient: of these elements, bf16 or fp32; only read.
    counter: counter of the first element's random bits (rounding_counter), if moments are bf16.

    The block must start at a multiple of 64 elements from its parameter's first one, and end at such a multiple or at
    the parameter's last element.
    """
    assert state.v is not None  # only parameters that Muon trains have none
    size = gradient.numel()
    master = state.working
    if state.residual is not None:
        master = scratch.master[:size]
        join_into(state.working, state.residual, master)
    is_narrow = state.m.dtype == torch.bfloat16
    m = scratch.m[:size].copy_(state.m) if is_narrow else state.m
    v = scratch.v[:size].copy_(state.v) if is_narrow else state.v
    torch._fused_adamw_(
        [master],
        [scaled(gradient, rates.scale, scratch.gradient[:size])],
        [m],
        [v],
        [],
        [rates.step],
        lr=rates.lr * weighting.lr_scale,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=weighting.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=False,
    )
    if is_narrow:
        _round_moments(state.m, state.v, counter, scratch)
    if state.residual is not None:
        split_into(master, state.working, state.residual, scratch.bits[:size])


def _round_moments(m: Tensor, v: Tensor, counter: int, scratch: Scratch) -> None:
    """Round a block's moments, which are in `scratch`, into `m` and `v` (bf16)."""
    size = m.numel()
    bits, random, random16 = scratch.bits[:size], scratch.random[:size], scratch.random16[:size]
    random_bits(counter, random, bits)
    round_into(scratch.m[:size], torch.bitwise_right_shift(random, 16, out=random16).bitwise_and_(0xFFFF), m, bits)
    round_into(scratch.v[:size], random.bitwise_and_(0xFFFF), v, bits)


def scaled(gradient: Tensor, scale: float, out: Tensor) -> Tensor:
    """Return the gradient as FP32, times an FP32 `scale`: in `out`, or itself if nothing changes."""
    if gradient.dtype == torch.float32:
        return gradient if scale == 1.0 else torch.mul(gradient, scale, out=out)
    # Multiplying the bf16 tensor itself would round the product to bf16.
    out.copy_(gradient)
    return out if scale == 1.0 else out.mul_(scale)
