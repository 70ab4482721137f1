"""Applies Muon's update to blocks that stay in a core's cache.

One pass goes from gradient and direction to working copy, residual and momentum. It is bit-equal to `torch.optim.Muon`
on whole FP32 matrices, wherever blocks are cut.
"""

from __future__ import annotations

from torch import Tensor

from megatrain_ray.engine.layout.split_master import join_into, split_into
from megatrain_ray.engine.optimizer.adamw import AdamState, Rates, Scratch, Weighting, scaled
from megatrain_ray.engine.optimizer.muon import Muon


def muon_block(
    state: AdamState,
    gradient: Tensor,
    directions: Tensor,
    muon: Muon,
    rates: Rates,
    weighting: Weighting,
    scratch: Scratch,
) -> None:
    """Update at most BLOCK_ELEMENTS elements of a parameter in place.

    gradient: of these elements, bf16 or fp32; only read.
    directions: of these elements, bf16; only read.
    """
    size = gradient.numel()
    master = state.working
    if state.residual is not None:
        master = scratch.master[:size]
        join_into(state.working, state.residual, master)
    state.m.lerp_(scaled(gradient, rates.scale, scratch.gradient[:size]), 1 - muon.momentum)
    lr = rates.lr * weighting.lr_scale
    master.mul_(1 - lr * weighting.weight_decay)
    master.add_(directions, alpha=-(lr * weighting.lr_ratio))
    if state.residual is not None:
        split_into(master, state.working, state.residual, scratch.bits[:size])
