"""Rounds FP32 to bf16 stochastically: to the next value below or above, by chance, so that the mean is the value.

AdamW's second moment falls in an update by a share of at most 1 - beta2. With beta2 = 0.999 that is less than half a
unit in bf16's last place (half a unit is at least 2^-9 of the value). So rounding to nearest would leave the moment
where it is. Rounded by chance, it moves as far on average (Gupta et al. 2015, https://arxiv.org/abs/1502.02551).

Adding 16 random bits to the 16 that bf16 drops carries into the bits that it keeps with the right probability, for
either sign. Nothing is added beyond the largest bf16, so nothing finite becomes infinite. A NaN becomes the canonical
one (0x7FC0).

The random bits are those of a counter, not of a stream. They are the 32-bit finalizer of MurmurHash3 (Austin Appleby,
public domain, https://github.com/aappleby/smhasher) of the element's index in its parameter plus a key. The key is made
from train.seed, AdamW's step and the parameter's name. The upper 16 bits are for m, the lower 16 for v. So results do
not depend on shards, threads, blocks, tiers or interruptions. Elements 2^32 apart have the same bits.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from megatrain_ray.engine.layout.split_master import CANONICAL_NAN
from megatrain_ray.io.batching.splitmix import splitmix64_chain

MASK = (1 << 32) - 1
MAGNITUDE = 0x7FFFFFFF
LARGEST = 0x7F7F0000  # the largest bf16, as fp32 bits


def rounding_counter(seed: int, step: int, parameter: str, first: int) -> int:
    """Return the counter from which `random_bits` makes the bits of element `first` of a parameter.

    It is in [0, 2^32), and the next element's is larger by 1.

    step: AdamW's own step count, from 1.
    """
    return splitmix64_chain(seed, step, zlib.crc32(parameter.encode())) + first & MASK


def random_bits(counter: int, out: Tensor, scratch: Tensor) -> None:
    """Fill `out` with the random bits of consecutive elements, the first of which has this counter.

    out: int32, 1-D.
    scratch: int32, as large as `out`; overwritten.
    """
    torch.arange(out.numel(), out=out)
    out.add_(as_int32(counter))
    _xor_shifted(out, 16, scratch).mul_(as_int32(0x85EBCA6B))
    _xor_shifted(out, 13, scratch).mul_(as_int32(0xC2B2AE35))
    _xor_shifted(out, 16, scratch)


def round_into(values: Tensor, random: Tensor, out: Tensor, scratch: Tensor) -> None:
    """Round `values` (fp32) stochastically into `out` (bf16), both 1-D.

    random: int32 in [0, 2^16), as large as `values`; overwritten.
    scratch: int32, as large as `values`; overwritten.
    """
    bits = values.view(torch.int32)
    torch.bitwise_and(bits, MAGNITUDE, out=scratch)
    random.masked_fill_(scratch >= LARGEST, 0)
    torch.add(bits, random, out=scratch).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(scratch).masked_fill_(values.isnan(), CANONICAL_NAN)


def _xor_shifted(values: Tensor, by: int, scratch: Tensor) -> Tensor:
    """Compute values ^= values >> by in place, with the values taken as unsigned."""
    torch.bitwise_right_shift(values, by, out=scratch).bitwise_and_((1 << 32 - by) - 1)
    return values.bitwise_xor_(scratch)


def as_int32(value: int) -> int:
    """Return the int32 that has the same last 32 bits."""
    value &= MASK
    return value - (1 << 32) if value >> 31 else value
