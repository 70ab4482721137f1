"""Updates blocks that stay in a core's cache, with torch's own operations.

One pass goes from gradient to residual, moments and working copy. AdamW is bit-equal to `torch.optim.AdamW(fused=True)`
on whole FP32 tensors. torch rounds v differently in the scalar tail of a vector. So blocks are cut at multiples of 64
elements from a parameter's first one, and only the parameter's own tail is scalar.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.split_master import join_into, split_into
from megatrain_ray.engine.optimizer.adamw import (
    BLOCK_ELEMENTS,
    AdamState,
    AdamWConstants,
    ParamCoefficients,
    ParamWeighting,
    UpdateParams,
)
from megatrain_ray.engine.optimizer.muon import Muon
from megatrain_ray.engine.optimizer.stochastic_rounding import random_bits, round_into
from megatrain_ray.engine.optimizer.undo_log import ParamSlice


class Scratch:
    """Holds one thread's buffers for a block, allocated once.

    thread: the thread's number, from 0.
    """

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.gradient, self.master, self.m, self.v = torch.empty(4, BLOCK_ELEMENTS, dtype=torch.float32).unbind()
        self.bits, self.random, self.random16 = torch.empty(3, BLOCK_ELEMENTS, dtype=torch.int32).unbind()


def update_block(
    part: ParamSlice, elements: ElementRange, gradient: Tensor, directions: Tensor | None, hyper: AdamWConstants,
    params: UpdateParams, scratch: Scratch,
) -> None:  # fmt: skip
    """Update a block of a part's elements in place: with Muon if it trains the part, else with AdamW.

    gradient: of the whole layer; only read.
    directions: the same for what Muon trains.
    """
    state, first = part.state.cut(elements), part.gradient_start
    of_block = slice(first + elements.start, first + elements.stop)
    if part.by_muon and directions is not None and hyper.muon:
        muon_block(state, gradient[of_block], directions[of_block], hyper.muon, params, part.weighting, scratch)
    else:
        counter = part.counter(hyper, params) + elements.start
        adamw_block(state, gradient[of_block], hyper, params, part.weighting, scratch, counter)


def adamw_block(
    state: AdamState, gradient: Tensor, hyper: AdamWConstants, params: UpdateParams, weighting: ParamWeighting,
    scratch: Scratch, counter: int = 0,
) -> None:  # fmt: skip
    """Update at most BLOCK_ELEMENTS elements of a parameter in place.

    gradient: of these elements, bf16 or fp32; only read.
    counter: counter of the first element's random bits (rounding_counter), if moments are bf16.

    The block must start at a multiple of 64 elements from its parameter's first one, and end at such a multiple or at
    the parameter's last element.
    """
    assert state.v is not None  # only parameters that Muon trains have none
    size = gradient.numel()
    master = _joined(state, scratch)
    is_narrow = state.m.dtype == torch.bfloat16
    m = scratch.m[:size].copy_(state.m) if is_narrow else state.m
    v = scratch.v[:size].copy_(state.v) if is_narrow else state.v
    torch._fused_adamw_(
        [master],
        [_scaled(gradient, params.scale, scratch.gradient[:size])],
        [m],
        [v],
        [],
        [torch.tensor(float(params.adam_step))],
        lr=params.lr * weighting.lr_scale,
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


def muon_block(
    state: AdamState, gradient: Tensor, directions: Tensor, muon: Muon, params: UpdateParams, weighting: ParamWeighting,
    scratch: Scratch,
) -> None:  # fmt: skip
    """Update at most BLOCK_ELEMENTS elements of a parameter that Muon trains in place.

    gradient: of these elements, bf16 or fp32; only read.
    directions: of these elements, bf16; only read.

    It is bit-equal to `torch.optim.Muon` on whole FP32 matrices, wherever blocks are cut.
    """
    size = gradient.numel()
    master = _joined(state, scratch)
    state.m.lerp_(_scaled(gradient, params.scale, scratch.gradient[:size]), 1 - muon.momentum)
    decay, step_size = ParamCoefficients.of_muon(params, weighting)
    master.mul_(decay)
    master.add_(directions, alpha=step_size)
    if state.residual is not None:
        split_into(master, state.working, state.residual, scratch.bits[:size])


def _joined(state: AdamState, scratch: Scratch) -> Tensor:
    if state.residual is None:
        return state.working
    master = scratch.master[: state.working.numel()]
    join_into(state.working, state.residual, master)
    return master


def _round_moments(m: Tensor, v: Tensor, counter: int, scratch: Scratch) -> None:
    size = m.numel()
    bits, random, random16 = scratch.bits[:size], scratch.random[:size], scratch.random16[:size]
    random_bits(counter, random, bits)
    round_into(scratch.m[:size], torch.bitwise_right_shift(random, 16, out=random16).bitwise_and_(0xFFFF), m, bits)
    round_into(scratch.v[:size], random.bitwise_and_(0xFFFF), v, bits)


def _scaled(gradient: Tensor, scale: float, out: Tensor) -> Tensor:
    """Return the gradient as FP32, times an FP32 `scale`: in `out`, or itself if nothing changes."""
    if gradient.dtype == torch.float32:
        return gradient if scale == 1.0 else torch.mul(gradient, scale, out=out)
    # Multiplying the bf16 tensor itself would round the product to bf16.
    out.copy_(gradient)
    return out if scale == 1.0 else out.mul_(scale)
