"""Muon on blocks that stay in a core's cache: from gradient and direction to working copy, residual and momentum.

Bit-equal to `torch.optim.Muon` on whole FP32 matrices, wherever blocks are cut.
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
    """Updates at most BLOCK_ELEMENTS elements in place. `gradient`: theirs, bf16 or fp32; `directions`: theirs, bf16;
    both are only read."""
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
