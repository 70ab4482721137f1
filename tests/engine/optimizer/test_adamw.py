"""Blocked AdamW against torch.optim.AdamW(fused=True) on whole FP32 tensors: bit for bit."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.split_master import join, split
from megatrain_ray.engine.optimizer.adamw import BLOCK_ELEMENTS, AdamState, AdamWConstants, ParamWeighting, UpdateParams
from megatrain_ray.engine.optimizer.torch_kernel import BlockPool, Scratch, adamw_block

pytestmark = pytest.mark.pairwise

HYPER = AdamWConstants(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
SCRATCH = Scratch(0)


@dataclass(frozen=True)
class Case:
    """Learning rate varies by step, as schedules make it."""

    num_steps: int = 10
    scale: float = 1.0
    decay: bool = True
    gradient_dtype: torch.dtype = torch.bfloat16
    split: bool = True

    def lr(self, step: int) -> float:
        return 1e-3 / step


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def blocks(length: int) -> Iterator[ElementRange]:
    for start in range(0, length, BLOCK_ELEMENTS):
        yield ElementRange(start, min(start + BLOCK_ELEMENTS, length))


def random_master(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)) * 0.02


def gradients(size: int, case: Case) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(size + 1)
    for _ in range(case.num_steps):
        yield torch.randn(size, generator=generator).mul_(3e-3).to(case.gradient_dtype)


def whole(master: Tensor, case: Case, feed: Iterable[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """torch's own: master, m and v after the steps."""
    parameter = torch.nn.Parameter(master.clone())
    decay = HYPER.weight_decay if case.decay else 0.0
    optimizer = torch.optim.AdamW([parameter], betas=(HYPER.beta1, HYPER.beta2), weight_decay=decay, fused=True)
    for step, gradient in enumerate(feed, 1):
        optimizer.param_groups[0]["lr"] = case.lr(step)
        parameter.grad = gradient.float() * torch.tensor(case.scale)
        optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]


def new_state(master: Tensor, case: Case) -> AdamState:
    working, residual = split(master) if case.split else (master.clone(), None)
    return AdamState(working, residual, torch.zeros_like(master), torch.zeros_like(master))


def in_blocks(master: Tensor, case: Case, feed: Iterable[Tensor], spans: Iterable[ElementRange]) -> AdamState:
    state = new_state(master, case)
    spans, weighting = list(spans), ParamWeighting(1.0, HYPER.weight_decay if case.decay else 0.0)
    for step, gradient in enumerate(feed, 1):
        params = UpdateParams(step, step, case.lr(step), case.scale)
        for span in spans:
            adamw_block(state.cut(span), gradient[slice(*span)], HYPER, params, weighting, SCRATCH)
    return state


def assert_bit_equal(state: AdamState, expected: tuple[Tensor, Tensor, Tensor]) -> None:
    master = state.working if state.residual is None else join(state.working, state.residual)
    for name, got, want in zip(("master", "m", "v"), (master, state.m, state.v), expected, strict=True):
        assert torch.equal(bits(got), bits(want)), f"{name} differs in {(bits(got) != bits(want)).sum()} elements"


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 4095, 4097, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, (3 << 18) + 1])
def test_sizes(size: int) -> None:
    case, master = Case(scale=0.37109375), random_master(size)
    expected = whole(master, case, gradients(size, case))
    assert_bit_equal(in_blocks(master, case, gradients(size, case), blocks(size)), expected)


@pytest.mark.parametrize("split", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.1234567])
def test_modes(split: bool, gradient_dtype: torch.dtype, decay: bool, scale: float) -> None:
    case = Case(scale=float(torch.tensor(scale)), decay=decay, gradient_dtype=gradient_dtype, split=split)
    master = random_master(10_007)
    feed = list(gradients(10_007, case))
    kept = [gradient.clone() for gradient in feed]
    assert_bit_equal(in_blocks(master, case, feed, blocks(10_007)), whole(master, case, kept))
    assert all(torch.equal(a, b) for a, b in zip(feed, kept, strict=True)), "a gradient was written"


@given(size=st.integers(1, 6000), cuts=st.sets(st.integers(1, 93), max_size=6), split=st.booleans())
def test_cuts_at_multiples_of_64_change_nothing(size: int, cuts: set[int], split: bool) -> None:
    case, master = Case(num_steps=3, split=split), random_master(size)
    edges = [0, *sorted(64 * c for c in cuts if 64 * c < size), size]
    spans = [ElementRange(a, b) for a, b in itertools.pairwise(edges)]
    expected = whole(master, case, gradients(size, case))
    assert_bit_equal(in_blocks(master, case, gradients(size, case), spans), expected)


def test_a_cut_inside_a_vector_would_be_seen() -> None:
    size, case = 6000, Case(split=False)
    master = random_master(size)
    odd = in_blocks(master, case, gradients(size, case), [ElementRange(0, 2011), ElementRange(2011, size)])
    assert not torch.equal(odd.v, whole(master, case, gradients(size, case))[2])


@pytest.mark.parametrize("split", [True, False], ids=["bf16", "fp32"])
def test_nan_and_infinity_propagate(split: bool) -> None:
    size, case = 300, Case(num_steps=2, split=split)
    master, feed = random_master(size), list(gradients(size, case))
    feed[0][5], feed[0][100], feed[0][299] = float("nan"), float("inf"), float("-inf")
    state = in_blocks(master, case, feed, blocks(size))
    values = state.working if state.residual is None else join(state.working, state.residual)
    for got, want in zip((values, state.m, state.v), whole(master, case, feed), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert values.isnan().nonzero().flatten().tolist() == [5, 100, 299]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_any_number_of_threads(num_threads: int) -> None:
    size, case = 5 * BLOCK_ELEMENTS + 77, Case(num_steps=2, scale=0.5)
    master = random_master(size)
    state = new_state(master, case)
    with closing(BlockPool(num_threads)) as pool:
        for step, gradient in enumerate(gradients(size, case), 1):
            params = UpdateParams(step, step, case.lr(step), case.scale)

            def job(
                span: ElementRange, scratch: Scratch, gradient: Tensor = gradient, params: UpdateParams = params
            ) -> None:
                weighting = ParamWeighting(1.0, HYPER.weight_decay)
                adamw_block(state.cut(span), gradient[slice(*span)], HYPER, params, weighting, scratch)

            pool.run(partial(job, span) for span in blocks(size))
    assert_bit_equal(state, whole(master, case, gradients(size, case)))


def test_pool_threads_use_one_torch_thread_and_leave_the_setting_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen: list[int] = []
        with closing(BlockPool(2)) as pool:
            pool.run(lambda _: seen.append(torch.get_num_threads()) for _ in range(8))
            assert seen == [1] * 8
            late = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            late.start()
            late.join()
        assert (seen[-1], torch.get_num_threads()) == (3, 3)
    finally:
        torch.set_num_threads(before)


def test_pool_raises_what_a_job_raised_and_works_on() -> None:
    def fail(_: Scratch) -> None:
        raise ValueError("block 1")

    done: list[int] = []
    with closing(BlockPool(2)) as pool:
        with pytest.raises(ValueError, match="block 1"):
            pool.run([fail])
        pool.run([lambda _: done.append(1)] * 5)
    assert done == [1] * 5
    assert not [t for t in threading.enumerate() if t.name.startswith("adamw")]
