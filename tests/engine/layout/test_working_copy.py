"""The split master over every class of bit pattern, against integer arithmetic written out here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_ray.engine.layout.split_master import join, join_into, split, split_into, to_working

INFINITY, NAN = 0x7F800000, 0x7FC0
EDGES = [
    0x00000000,  # 0
    0x00000001,  # the smallest subnormal
    0x00007FFF,  # just under a tie, subnormal
    0x00008000,  # a tie, subnormal
    0x007FFFFF,  # the largest subnormal, rounds up to a normal
    0x00800000,  # the smallest normal
    0x3F800000,  # 1
    0x3F807FFF,  # just under a tie
    0x3F808000,  # a tie that torch's cast takes down, to even
    0x3F818000,  # a tie that torch's cast takes up
    0x3FFFFFFF,  # carries into the exponent
    0x7F7F7FFF,  # the largest with a finite working copy
    0x7F7FFFFF,  # FLT_MAX: an infinite working copy, and exact
    INFINITY,
    0x7F800001,  # NaN whose payload lies in the lower half
    0x7FC00000,  # the usual NaN
    0x7FFF8000,  # NaN that rounding would carry into -0
    0x7FFFFFFF,
]
BITS = st.sampled_from(EDGES) | st.integers(0, 0x7FFFFFFF) | st.integers(0, 0x7FFF).map(lambda h: h << 16 | 0x8000)


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor([b - (b >> 31 << 32) for b in bits], dtype=torch.int32).view(torch.float32)


def bits_of(tensor: torch.Tensor) -> list[int]:
    width = 8 * tensor.itemsize
    return [int(b) % (1 << width) for b in tensor.view(torch.int16 if width == 16 else torch.int32).flatten()]


def expected(bits: int) -> tuple[int, int]:
    """Working bits and residual, by the definition."""
    if bits & 0x7FFFFFFF > INFINITY:
        return NAN, 0
    working = (bits + 0x8000) >> 16
    return working, bits - (working << 16)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(BITS, st.booleans()), min_size=1, max_size=40))
def test_every_bit_pattern_splits_by_the_definition_and_joins_exactly(patterns: list[tuple[int, bool]]) -> None:
    bits = [b | sign << 31 for b, sign in patterns]
    master = from_bits(bits)
    working, residual = split(master)
    assert list(zip(bits_of(working), residual.tolist(), strict=True)) == [expected(b) for b in bits]
    assert bits_of(master) == bits  # what was split is untouched
    assert bits_of(to_working(master)) == bits_of(working)
    assert bits_of(join(working, residual)) == [b if expected(b)[0] != NAN else NAN << 16 for b in bits]


LOWER = [0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]  # 0, around half, and all ones


def as_master(bits: torch.Tensor) -> torch.Tensor:
    """FP32 values of int64 bits in [0, 2^32)."""
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


def assert_split_by_definition(bits: torch.Tensor) -> None:
    """Assert that split and join follow their definition, computed in 64-bit integers where the product works in 32.

    bits: int64 in [0, 2^32).

    Run once over all 2^32 patterns (2026-11-21, torch 2.13 on a CPU; 17 minutes): no difference.
    """
    master = as_master(bits)
    working, residual = split(master)
    nan = (bits & 0x7FFFFFFF) > INFINITY
    expected_working = torch.where(nan, NAN, (bits + 0x8000) >> 16)
    expected_residual = torch.where(nan, 0, bits - (expected_working << 16))
    assert torch.equal(working.view(torch.int16).long() & 0xFFFF, expected_working)
    assert torch.equal(residual.long(), expected_residual)
    joined = join(working, residual).view(torch.int32).long() & 0xFFFFFFFF
    assert torch.equal(joined, torch.where(nan, NAN << 16, bits))


@pytest.mark.parametrize("lower", LOWER)
def test_every_sign_exponent_and_upper_mantissa(lower: int) -> None:
    """All 2^16 upper halves: both zeros, every denormal and infinity, and NaNs of every payload class."""
    assert_split_by_definition((torch.arange(1 << 16) << 16) + lower)


@pytest.mark.parametrize("upper", [0x0000, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF])
@pytest.mark.parametrize("sign", [0, 0x8000])
def test_every_lower_half(upper: int, sign: int) -> None:
    """All 2^16 of them, where the exponent, a denormal or infinity begins or ends."""
    assert_split_by_definition(((upper | sign) << 16) + torch.arange(1 << 16))


@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_all_lower_halves_of_one_exponent_are_exact(sign: int) -> None:
    bits = (torch.arange(1 << 17, dtype=torch.int64) + 0x3F800000 + sign).to(torch.int32)
    master = bits.view(torch.float32)
    working, residual = split(master)
    assert torch.equal(join(working, residual).view(torch.int32), bits)
    assert (residual.min().item(), residual.max().item()) == (-32768, 32767)
    assert (working.double() - master.double()).abs().max() <= 2**-8


def test_only_ties_differ_from_the_cast_of_torch() -> None:
    master = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    working, residual = split(master)
    differs = working != master.to(torch.bfloat16)
    assert 0 < differs.sum() < 20
    assert (residual[differs] == -32768).all()


def test_a_nan_is_found_among_many_and_infinities_alone_stay() -> None:
    master = torch.randn(4099, generator=torch.Generator().manual_seed(0))
    master[17], master[18] = float("inf"), float("-inf")
    working, residual = split(master)
    assert torch.equal(join(working, residual), master)
    master[4098] = float("nan")
    assert to_working(master).isnan().nonzero().tolist() == [[4098]]


def test_in_place_variants_write_slices_and_use_the_scratch_given() -> None:
    master = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    working, residual = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int16)
    views = working[8:38].view(6, 5), residual[3:33].view(6, 5)
    split_into(master, *views, scratch=torch.empty(6, 5, dtype=torch.int32))
    joined = torch.full((6, 5), torch.nan)
    join_into(*views, joined)
    assert torch.equal(joined, master)
    assert not working[:8].any() and not working[38:].any() and not residual[:3].any() and not residual[33:].any()


def test_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"float32, got torch\.bfloat16"):
        to_working(torch.ones(4, dtype=torch.bfloat16))
