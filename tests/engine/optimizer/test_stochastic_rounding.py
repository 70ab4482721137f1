"""Rounding by chance: to a neighbour, exact in the mean, from random bits of nothing but seed, step and element."""

from __future__ import annotations

import math
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megatrain_ray.engine.optimizer.adamw import AdamState, AdamWConstants, ParamWeighting, UpdateParams
from megatrain_ray.engine.optimizer.stochastic_rounding import as_int32, random_bits, round_into, rounding_counter
from megatrain_ray.engine.optimizer.undo_log import ParamSlice
from megatrain_ray.engine.optimizer.update_kernel import open_kernel
from tests.support.rounded_moments import murmur3_finalizer

NARROW = AdamWConstants(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, moments_seed=3)
EVERY = torch.arange(1 << 16, dtype=torch.int32)  # 16 random bits
LARGEST = torch.finfo(torch.bfloat16).max


def rounded(values: Tensor, random: Tensor) -> Tensor:
    out = torch.empty_like(values, dtype=torch.bfloat16)
    round_into(values, random.clone(), out, torch.empty_like(random))
    return out


def bits(counter: int, size: int) -> Tensor:
    """Return random bits as int64, in [0, 2^32)."""
    out = torch.empty(size, dtype=torch.int32)
    random_bits(counter, out, torch.empty_like(out))
    return out.to(torch.int64) & 0xFFFFFFFF


@given(st.integers(0, 0xFFFFFFFF))
@example(0)
@example(0x80000000)
@example(0x80000001)
@example(0x7F7EFFFF)
@example(0x7F7FFFFF)
@example(0xFF7F0001)
@example(0x7F800000)
@example(0xFF800000)
@example(0x7F800001)
@example(0xFFFFFFFF)
def test_every_value_becomes_a_neighbour_and_their_mean(of_value: int) -> None:
    """Over all random bits there are, a value is rounded up as often as its distance from below says, without an error.

    Among the FP32 values, given by their bits, are zeros, the smallest, the last below the largest bf16 and beyond it,
    infinities, and NaNs.
    """
    value = float(np.array([of_value], np.uint32).view(np.float32)[0])
    values = torch.tensor([as_int32(of_value)], dtype=torch.int32).view(torch.float32).expand(1 << 16).contiguous()
    got = rounded(values, EVERY)
    if math.isnan(value):
        assert torch.equal(got.view(torch.int16), torch.full_like(EVERY, 0x7FC0).to(torch.int16))
        return
    toward_zero = torch.tensor(value).view(torch.int32).bitwise_and(-0x10000).view(torch.float32)
    if abs(value) >= LARGEST:
        assert torch.equal(got.float(), toward_zero.expand(1 << 16)), "no finite value becomes infinite"
        return
    away = (toward_zero.view(torch.int32) + 0x10000).view(torch.float32)
    assert ((got.float() == toward_zero) | (got.float() == away)).all()
    assert torch.equal(got.signbit(), values.signbit())
    assert got.double().mean().item() == pytest.approx(value, rel=1e-12, abs=0)


def test_the_mixer_is_murmurs() -> None:
    """Values of its C source."""
    assert bits(0, 3).tolist() == [0, 0x514E28B7, 0x30F4C306]
    assert bits(0xFFFFFFFF, 2).tolist() == [0x81F16F39, 0]
    counter = rounding_counter(7, 3, "layers.0.up", 100)
    expected = murmur3_finalizer(np.uint64(counter) + np.arange(5000, dtype=np.uint64) & np.uint64(0xFFFFFFFF))
    assert bits(counter, 5000).tolist() == expected.tolist()


def test_bits_are_those_of_seed_step_parameter_and_element() -> None:
    here = bits(rounding_counter(7, 3, "up", 0), 1000)
    assert torch.equal(bits(rounding_counter(7, 3, "up", 400), 600), here[400:])
    assert torch.equal(bits(rounding_counter(7, 3, "up", (1 << 32) + 400), 600), here[400:])
    for other in ((8, 3, "up", 0), (7, 4, "up", 0), (7, 3, "down", 0)):
        same = (bits(rounding_counter(*other), 1000) >> 16) == (here >> 16)
        assert same.sum() < 5, "by chance one of 65536"


def test_bits_are_fair() -> None:
    """Mean and spread of both halves, and nothing that a step shares with the next: within five standard errors."""
    size = 1 << 18
    now, later = (bits(rounding_counter(0, step, "w", 0), size) for step in (1, 2))
    halves = [(x & 0xFFFF).double() / 65536 - 0.5 for x in (now, now >> 16, later, later >> 16)]
    for half in halves:
        assert abs(half.mean().item()) < 5 / math.sqrt(12 * size)
        assert half.var().item() == pytest.approx(1 / 12, rel=0.01)
    pairs = [(a, b) for i, a in enumerate(halves) for b in halves[i + 1 :]]
    for a, b in [*pairs, (halves[0][1:], halves[0][:-1])]:
        assert abs((a * b).mean().item()) < 5 / (12 * math.sqrt(size))


def test_a_second_moment_does_not_stall() -> None:
    """With beta2 = 0.999, v follows (1 - 0.999^n)·g².

    Rounded to nearest it would stay where an update adds less than half of a last place.
    """
    size, steps = 4096, 700
    state = AdamState(torch.zeros(size), None, *torch.zeros(2, size, dtype=torch.bfloat16))
    gradient, nearest = torch.ones(size), torch.zeros(1, dtype=torch.bfloat16)
    with closing(open_kernel(1, NARROW)) as kernel:
        for step in range(1, steps + 1):
            params = UpdateParams(step, step, 1e-3, 1.0)
            kernel.update([ParamSlice(state, 0, ParamWeighting(1.0, 0.0), 0, "w")], gradient, params, None)
            nearest = (nearest.float() * 0.999 + 0.001).bfloat16()
    expected = 1 - 0.999**steps
    assert state.v is not None
    assert state.v.float().mean().item() == pytest.approx(expected, rel=0.005)
    assert nearest.item() < 0.6 * expected
    assert state.m.float().mean().item() == pytest.approx(1.0, rel=0.005)
