"""Stochastic rounding of FP32 to bf16: to the next value below or above, by chance, so that the mean is the value.

AdamW's second moment falls by a share of at most 1 - beta2 an update: with beta2 = 0.999 less than half of bf16's last
place (2^-9 of the value at least), so that rounding to nearest would leave it where it is. By chance it moves as far on
average (Gupta et al. 2015, https://arxiv.org/abs/1502.02551).

Adding 16 random bits to those that bf16 drops carries into the bits that it keeps with the right probability, of either
sign. Nothing is added beyond the largest bf16, so that nothing finite becomes infinite, and a NaN becomes the canonical
one (0x7FC0).

Random bits are those of a counter, not of a stream: the 32-bit finalizer of MurmurHash3 (Austin Appleby, public domain,
https://github.com/aappleby/smhasher) of the element's index in its parameter plus a key of train.seed, AdamW's step and
the parameter's name; the upper 16 for m, the lower for v. So shards, threads, blocks and tiers do not matter, nor does
what was interrupted. Elements 2^32 apart have the same.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from megatrain_ray.engine.layout.split_master import CANONICAL_NAN
from megatrain_ray.io.batching.splitmix import splitmix64_chain

MASK = (1 << 32) - 1
MAGNITUDE = 0x7FFFFFFF
LARGEST = 0x7F7F0000  # in fp32 bits


def rounding_counter(seed: int, step: int, parameter: str, first: int) -> int:
    """What `random_bits` of element `first` of a parameter is made of; the next one's is larger by 1. In [0, 2^32).

    `step`: AdamW's own, from 1.
    """
    return splitmix64_chain(seed, step, zlib.crc32(parameter.encode())) + first & MASK


def random_bits(counter: int, out: Tensor, scratch: Tensor) -> None:
    """Fills `out` (int32, 1-D) with the bits of as many elements from that of `counter` on. `scratch`: as large."""
    torch.arange(out.numel(), out=out)
    out.add_(as_int32(counter))
    _xor_shifted(out, 16, scratch).mul_(as_int32(0x85EBCA6B))
    _xor_shifted(out, 13, scratch).mul_(as_int32(0xC2B2AE35))
    _xor_shifted(out, 16, scratch)


def round_into(values: Tensor, random: Tensor, out: Tensor, scratch: Tensor) -> None:
    """Rounds `values` (fp32) into `out` (bf16), both 1-D. `random`: int32, in [0, 2^16); `scratch`: int32; both are as
    large and overwritten."""
    bits = values.view(torch.int32)
    torch.bitwise_and(bits, MAGNITUDE, out=scratch)
    random.masked_fill_(scratch >= LARGEST, 0)
    torch.add(bits, random, out=scratch).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(scratch).masked_fill_(values.isnan(), CANONICAL_NAN)


def _xor_shifted(values: Tensor, by: int, scratch: Tensor) -> Tensor:
    """values ^= values >> by, of unsigned ones."""
    torch.bitwise_right_shift(values, by, out=scratch).bitwise_and_((1 << 32 - by) - 1)
    return values.bitwise_xor_(scratch)


def as_int32(value: int) -> int:
    """That of the same last 32 bits."""
    value &= MASK
    return value - (1 << 32) if value >> 31 else value
