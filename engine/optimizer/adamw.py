"""AdamW on blocks that stay in a core's cache: one pass from gradient to residual, moments and working copy.

Bit-equal to `torch.optim.AdamW(fused=True)` on whole FP32 tensors. torch rounds v otherwise in the scalar tail of a
vector, so blocks are cut at multiples of 64 elements from a parameter's first one: only its own tail is scalar then.
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
    """AdamW's constants, as `torch.optim.AdamW` takes them. `weight_decay`: of parameters that decay and whose group
    has none of its own, Muon's too. `muon`: the constants of what Muon trains, where it trains anything.
    `moments_seed`: of the bits that moments in bf16 are rounded with; None: moments are FP32, as Muon's momentum is."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    muon: Muon | None = None
    moments_seed: int | None = None


class Rates(NamedTuple):
    """What varies from update to update. `step`: AdamW's own count from 1, as the FP32 scalar that torch takes.
    `scale`: multiplies gradients, an FP32 value."""

    step: Tensor
    lr: float
    scale: float


class Weighting(NamedTuple):
    """What differs from parameter to parameter: the learning rate is that of the update times `lr_scale`; where Muon
    moves the parameter, not where it decays, times `lr_ratio` as well."""

    lr_scale: float
    weight_decay: float
    lr_ratio: float = 1.0


class Coefficients(NamedTuple):
    """Of an update, for all parameters: torch's, in double; a kernel rounds them to FP32."""

    m_weight: float
    v_keep: float
    v_weight: float
    root: float  # of v's bias correction

    @classmethod
    def of(cls, hyper: Hyper, rates: Rates) -> Coefficients:
        root = math.sqrt(1 - hyper.beta2 ** rates.step.item())
        return cls(1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, root)


class Move(NamedTuple):
    """How an update moves one parameter: decayed, then along m over v's root. In double, as above."""

    decay: float
    step_size: float

    @classmethod
    def of(cls, hyper: Hyper, rates: Rates, weighting: Weighting) -> Move:
        lr = rates.lr * weighting.lr_scale
        correction = float(1 - hyper.beta1 ** rates.step.item())
        return cls(1 - lr * weighting.weight_decay, -(lr / correction))


class AdamState(NamedTuple):
    """Some elements of one parameter, 1-D tensors of one length.

    Split master: `working` bf16 and `residual` int16; else `working` is the FP32 master itself and `residual` None.
    `m` and `v` fp32, or both bf16; what Muon trains has no `v`.
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
    """One thread's buffers for a block, allocated once. `thread`: its number, from 0."""

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
    """Updates at most BLOCK_ELEMENTS elements in place. `gradient`: theirs, bf16 or fp32; is only read. `counter`: of
    the first one's random bits (rounding_counter), where moments are bf16.

    The block must start at a multiple of 64 elements from its parameter's first one, and end at one or at its last.
    """
    assert state.v is not None  # or it were Muon's
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
    """Those of a block, in `scratch`, into `m` and `v` (bf16)."""
    size = m.numel()
    bits, random, random16 = scratch.bits[:size], scratch.random[:size], scratch.random16[:size]
    random_bits(counter, random, bits)
    round_into(scratch.m[:size], torch.bitwise_right_shift(random, 16, out=random16).bitwise_and_(0xFFFF), m, bits)
    round_into(scratch.v[:size], random.bitwise_and_(0xFFFF), v, bits)


def scaled(gradient: Tensor, scale: float, out: Tensor) -> Tensor:
    """The gradient as FP32, times an FP32 `scale`: in `out`, or itself where that changes nothing."""
    if gradient.dtype == torch.float32:
        return gradient if scale == 1.0 else torch.mul(gradient, scale, out=out)
    # The product of a bf16 tensor would be rounded to bf16 first.
    out.copy_(gradient)
    return out if scale == 1.0 else out.mul_(scale)
