"""Rounds moments to bf16 for the reference of parity: up or down by chance, element by element, in numpy.

Of the product it imports only where a parameter's random bits begin.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain_ray.engine.optimizer.stochastic_rounding import rounding_counter

MASK = np.uint64(0xFFFFFFFF)
LARGEST = 0x7F7F  # finite bf16


def round_moments(m: Tensor, v: Tensor, name: str, step: int, seed: int) -> None:
    """Replace the FP32 moments of a parameter after AdamW's `step` by the nearest bf16 values above or below."""
    bits = murmur3_finalizer(rounding_counter(seed, step, name, 0) + np.arange(m.numel(), dtype=np.uint64) & MASK)
    m.copy_(_rounded(m, bits >> np.uint64(16)))
    v.copy_(_rounded(v, bits & np.uint64(0xFFFF)))


def murmur3_finalizer(h: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return fmix32 of https://github.com/aappleby/smhasher/blob/master/src/MurmurHash3.cpp, of 32-bit values."""
    h ^= h >> np.uint64(16)
    h = h * np.uint64(0x85EBCA6B) & MASK
    h ^= h >> np.uint64(13)
    h = h * np.uint64(0xC2B2AE35) & MASK
    return h ^ h >> np.uint64(16)


def _rounded(values: Tensor, random: NDArray[np.uint64]) -> Tensor:
    """Round away from zero where the 16 bits that bf16 drops plus the random bits carry over, else towards zero."""
    bits = values.detach().cpu().flatten().numpy().view(np.uint32)
    kept, dropped = bits >> 16, bits & 0xFFFF
    carries = (dropped + random >= 1 << 16) & ((kept & 0x7FFF) < LARGEST)
    rounded = torch.from_numpy(((kept + carries) << 16).astype(np.uint32).view(np.float32))
    return torch.where(values.detach().cpu().flatten().isnan(), torch.nan, rounded).view(values.shape)
