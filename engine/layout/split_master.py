"""Splits an FP32 master weight into a bf16 working copy (what streams) and an int16 residual. Exact.

    fp32 bits = (working bits << 16) + residual,    residual in [-32768, 32767]

The working copy is the master rounded to nearest. Ties round up, which means away from zero, since the sign is a
separate bit. torch's own cast rounds ties to even, which differs in about 1 weight of 10^5. A master near FLT_MAX has
an infinite working copy and still joins exactly. A NaN becomes the canonical NaN (working 0x7FC0, residual 0), and so
stays a NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CANONICAL_NAN = 0x7FC0
HALF = 0x8000  # half of a working copy's last place, in fp32 bits


def to_working(master: Tensor) -> Tensor:
    """Return the working copy (bf16) of an FP32 tensor of any shape. Raises as `split_into`."""
    return split(master)[0]


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return working copy (bf16) and residual (int16) of an FP32 tensor of any shape. Raises as `split_into`."""
    working = torch.empty_like(master, dtype=torch.bfloat16)
    residual = torch.empty_like(master, dtype=torch.int16)
    split_into(master, working, residual)
    return working, residual


def split_into(master: Tensor, working_out: Tensor, residual_out: Tensor, scratch: Tensor | None = None) -> None:
    """Split `master` (fp32) into `working_out` (bf16) and `residual_out` (int16), all of one shape.

    scratch: int32 of that shape, overwritten. Without it one is allocated, which costs more than the arithmetic if the
        tensors are in the caches.
    Raises TypeError for a master of any other type.
    """
    if master.dtype != torch.float32:
        raise TypeError(f"a master is float32, got {master.dtype}")
    bits = master.view(torch.int32)
    scratch = torch.empty_like(bits) if scratch is None else scratch
    torch.add(bits, HALF, out=scratch).bitwise_right_shift_(16)
    working_out.view(torch.int16).copy_(scratch)
    torch.sub(bits, scratch.bitwise_left_shift_(16), out=scratch)
    residual_out.copy_(scratch)
    if _may_hold_nan(master):
        nan = master.isnan()
        working_out.view(torch.int16).masked_fill_(nan, CANONICAL_NAN)
        residual_out.masked_fill_(nan, 0)


def join(working: Tensor, residual: Tensor) -> Tensor:
    """Return the FP32 master of a working copy (bf16) and its residual (int16), all of one shape."""
    master = torch.empty_like(working, dtype=torch.float32)
    join_into(working, residual, master)
    return master


def join_into(working: Tensor, residual: Tensor, master_out: Tensor) -> None:
    """Write the master of a working copy (bf16) and its residual (int16) into `master_out` (fp32, same shape)."""
    bits = master_out.view(torch.int32)
    bits.copy_(working.view(torch.int16)).bitwise_left_shift_(16).add_(residual)


def _may_hold_nan(master: Tensor) -> bool:
    """Return False only if `master` is known to hold no NaN.

    A sum is NaN if an element is, and costs 1/20 of a test of each element. On other devices than a CPU the host would
    wait for the sum, so they return True.
    """
    return master.device.type != "cpu" or math.isnan(master.sum().item())
