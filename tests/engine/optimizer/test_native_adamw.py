"""The native kernel against torch, bit for bit; what happens where it cannot be built or is not equal."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.split_master import join, split
from megatrain_ray.engine.optimizer import update_kernel
from megatrain_ray.engine.optimizer.adamw import AdamState, AdamWConstants, ParamWeighting, UpdateParams
from megatrain_ray.engine.optimizer.muon import LrAdjustment, Muon
from megatrain_ray.engine.optimizer.native import native_kernel
from megatrain_ray.engine.optimizer.native.native_kernel import VARIANTS, NativeAdamW
from megatrain_ray.engine.optimizer.torch_kernel import TorchBlocks
from megatrain_ray.engine.optimizer.undo_log import ParamSlice, Transaction, num_units
from megatrain_ray.engine.optimizer.update_kernel import NATIVE, SIZES, UpdateKernel, check_kernel, open_kernel
from megatrain_ray.errors import MegatrainError

HYPER = AdamWConstants(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
MUON = Muon(momentum=0.95, nesterov=True, ns_steps=5, adjust_lr=LrAdjustment.ORIGINAL)
NARROW = replace(HYPER, moments_seed=5)
LARGEST = (3 << 20) + 1


def state_of(size: int, *, is_split: bool, is_narrow: bool = False) -> AdamState:
    generator = torch.Generator().manual_seed(size)
    master, m, v = (torch.randn(size, generator=generator) * scale for scale in (0.02, 1e-3, 1e-5))
    working, residual = split(master) if is_split else (master, None)
    dtype = torch.bfloat16 if is_narrow else torch.float32
    return AdamState(working, residual, m.to(dtype), v.abs_().to(dtype))


def parts_of(state: AdamState, sizes: Sequence[int]) -> list[ParamSlice]:
    """Parameters one after the other; every second one decays, every third one has another learning rate."""
    parts, start, unit = [], 0, 0
    for index, size in enumerate(sizes):
        weighting = ParamWeighting(1.0 if index % 3 else 0.7, HYPER.weight_decay * (index % 2))
        own = state.cut(ElementRange(start, start + size))
        parts.append(ParamSlice(own, start, weighting, unit, f"parameter {index}", 1000 * index))
        start, unit = start + size, unit + num_units(size)
    return parts


def native(num_threads: int = 2, hyper: AdamWConstants = HYPER) -> NativeAdamW:
    kernel = open_kernel(num_threads, hyper)
    assert isinstance(kernel, NativeAdamW)
    return kernel


def run(
    kernel: UpdateKernel, sizes: Sequence[int], gradients: Sequence[Tensor], scale: float, state: AdamState
) -> AdamState:
    for step, gradient in enumerate(gradients, 1):
        params = UpdateParams(step, step, 1e-3 / step, float(torch.tensor(scale)))
        kernel.update(parts_of(state, sizes), gradient, params, None)
    return state


def assert_same(got: AdamState, want: AdamState) -> None:
    for name, a, b in zip(AdamState._fields, got, want, strict=True):
        if a is not None and b is not None:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def compare(
    sizes: Sequence[int], dtype: torch.dtype, scale: float, *, is_split: bool, hyper: AdamWConstants = HYPER
) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    gradients = [(torch.randn(sum(sizes), generator=generator) * 3e-3).to(dtype) for _ in range(2)]
    before = [gradient.clone() for gradient in gradients]
    with closing(native(hyper=hyper)) as kernel, closing(TorchBlocks(2, hyper)) as blocks:
        is_narrow = hyper.moments_seed is not None
        got, want = (state_of(sum(sizes), is_split=is_split, is_narrow=is_narrow) for _ in range(2))
        run(kernel, sizes, gradients, scale, got)
        assert_same(got, run(blocks, sizes, gradients, scale, want))
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True)), "a gradient was written"


@given(
    sizes=st.lists(st.one_of(st.integers(1, 200), st.integers(1, 70_000)), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    scale=st.sampled_from([1.0, 0.1234567]),
    is_split=st.booleans(),
    hyper=st.sampled_from([HYPER, NARROW]),
)
def test_sizes_and_modes(
    sizes: list[int], dtype: torch.dtype, scale: float, is_split: bool, hyper: AdamWConstants
) -> None:
    compare(sizes, dtype, scale, is_split=is_split, hyper=hyper)


@pytest.mark.parametrize("is_split", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("size", [(1 << 18) + 7, (1 << 20) - 1, LARGEST])
def test_large_sizes(size: int, is_split: bool) -> None:
    compare([size], torch.bfloat16, 0.3, is_split=is_split)


def test_a_large_size_with_narrow_moments() -> None:
    """Cut by threads and into blocks; random bits are those of elements."""
    compare([77, (1 << 18) + 7], torch.bfloat16, 0.3, is_split=True, hyper=NARROW)


@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.5])
def test_a_light_first_moment(beta1: float) -> None:
    """torch's lerp computes from its other end there."""
    compare([77, 3000, 20_001], torch.float32, 0.3, is_split=True, hyper=replace(HYPER, beta1=beta1))


def with_variant(variant: int, vector: int, num_threads: int, hyper: AdamWConstants) -> NativeAdamW:
    kernel = NativeAdamW(num_threads, hyper, vector=vector)
    kernel._variant = variant
    return kernel


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=VARIANTS)
def test_every_variant_equals_torch(variant: int) -> None:
    with closing(native()) as best:
        if best._variant < variant:
            pytest.skip(f"this processor has no {VARIANTS[variant]}")
        for hyper in (
            HYPER,
            NARROW,
            replace(NARROW, beta1=0.3),
            *(replace(HYPER, muon=replace(MUON, momentum=m)) for m in (0.95, 0.5, 0.0)),
        ):
            check_kernel(partial(with_variant, variant, best._vector), hyper)


class Wrong(NativeAdamW):
    """Right but for one bit of one moment of a part."""

    wrong = 5

    def update(
        self,
        parts: Sequence[ParamSlice],
        gradient: Tensor,
        params: UpdateParams,
        transaction: Transaction | None,
        directions: Tensor | None = None,
    ) -> None:
        super().update(parts, gradient, params, transaction, directions)
        state = parts[self.wrong].state
        (state.m if state.v is None else state.v).view(torch.int32)[-1] ^= 1


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == update_kernel.log.name]


def test_a_kernel_that_is_wrong_by_a_bit_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    wrong = (partial(Wrong, vector=8), partial(Wrong, vector=8))
    for _ in range(2):  # the second time nothing is checked or logged
        with closing(open_kernel(1, HYPER, wrong)) as kernel:
            assert kernel.name == "torch blocks"
    (message,) = warnings(caplog)
    assert message.startswith("AdamW runs in torch blocks, which is slower: native")
    assert f"differs from torch {torch.__version__} in v of a parameter of 7 elements (split master" in message
    with closing(open_kernel(1, HYPER, (*wrong, *NATIVE))) as kernel:
        assert kernel.name.startswith("native")


def test_without_a_compiler_torch_does_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(native_kernel, "_load_library", native_kernel._Library)
    hyper = replace(HYPER, eps=1.5e-8)  # not checked before
    with closing(open_kernel(1, hyper)) as kernel:
        assert kernel.name == "torch blocks"
    assert warnings(caplog) == [
        "AdamW runs in torch blocks, which is slower: no C compiler on PATH (looked for cc, gcc, clang, g++, clang++)"
    ]


@pytest.mark.parametrize("compiler", ["gcc", "g++", "clang"])
def test_other_compilers_make_the_same(compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.setattr("megatrain_ray.io.words.compile_c.COMPILERS", (compiler,))
    monkeypatch.setattr(native_kernel, "_load_library", native_kernel._Library)
    with closing(native()) as kernel:
        for hyper in (HYPER, NARROW):
            check_kernel(partial(NativeAdamW, vector=kernel._vector), hyper)


@pytest.mark.parametrize("build", [partial(NativeAdamW, vector=8), TorchBlocks], ids=["native", "torch"])
def test_copies(build: type[TorchBlocks]) -> None:
    """Copies have no, some and many chunks, aligned and not; not a byte beyond them is touched."""
    sizes = (1, 0, 4095, (3 << 20) + 1, 1 << 20)
    sources = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    rooms = [torch.zeros(n + 2 * (64 + shift), dtype=torch.uint8) for shift, n in enumerate(sizes)]
    copies = [room[64 + shift : 64 + shift + n] for shift, (room, n) in enumerate(zip(rooms, sizes, strict=True))]
    with closing(build(3, HYPER)) as kernel:
        kernel.copy(list(zip(copies, sources, strict=True)))
        kernel.copy([])
    assert all(torch.equal(a, b) for a, b in zip(copies, sources, strict=True))
    for room, source in zip(rooms, sources, strict=True):
        assert room.sum(dtype=torch.int64) == source.sum(dtype=torch.int64)


class WrongMomentum(Wrong):
    wrong = len(SIZES) + 5


def test_a_kernel_whose_muon_is_wrong_by_a_bit_is_not_used() -> None:
    build = partial(WrongMomentum, vector=8)
    with closing(open_kernel(1, replace(HYPER, muon=MUON), (build,))) as kernel:
        assert kernel.name == "torch blocks"
    with pytest.raises(MegatrainError, match=rf"differs from torch .* in m of a parameter of {SIZES[5]} elements"):
        check_kernel(build, replace(HYPER, muon=MUON))


@pytest.mark.parametrize("is_split", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_muon_of_large_matrices_is_torchs(dtype: torch.dtype, is_split: bool) -> None:
    """More than a block, cut by threads; what AdamW trains lies before it."""
    rows, columns = 1025, 515
    size, lr, decay = rows * columns, 1e-3, 0.2
    generator = torch.Generator().manual_seed(0)
    state, gradient, directions = (
        state_of(200 + size, is_split=is_split),
        *torch.randn(2, 200 + size, generator=generator),
    )
    gradient, directions = gradient.to(dtype), directions.bfloat16()
    master, m = state.working[200:].float(), state.m[200:].clone()
    if state.residual is not None:
        master = join(state.working[200:], state.residual[200:])
    m.lerp_(gradient[200:].float() * torch.tensor(0.3), 1 - MUON.momentum)
    master.mul_(1 - 0.7 * lr * decay).add_(directions[200:], alpha=-(0.7 * lr * 1.5))
    norm = ParamSlice(state.cut(ElementRange(0, 200)), 0, ParamWeighting(1.0, 0.0), 0)
    matrix = ParamSlice(
        state.cut(ElementRange(200, 200 + size))._replace(v=None), 200, ParamWeighting(0.7, decay, 1.5), norm.units.stop
    )
    with closing(native(3, replace(HYPER, muon=MUON))) as kernel:
        params = UpdateParams(1, 1, lr, float(torch.tensor(0.3)))
        kernel.update([norm, matrix], gradient, params, None, directions)
    ours = matrix.state
    assert torch.equal(ours.m, m)
    assert torch.equal(ours.working if ours.residual is None else join(ours.working, ours.residual), master)


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_threads_end_on_close_or_when_nobody_holds_the_kernel() -> None:
    before = num_threads()
    kernel = native(4)
    assert num_threads() == before + 3, "the caller's own thread is one of them"
    kernel.close()
    kernel.close()
    assert num_threads() == before
    kernel = native(3)
    assert num_threads() == before + 2
    del kernel
    gc.collect()
    assert num_threads() == before


def test_many_small_updates_with_more_threads_than_cores() -> None:
    """Helpers that wake up late find nothing to do, or the next update."""
    sizes, params = [100, 20_000, 77, 40_000], UpdateParams(3, 3, 1e-3, 1.0)
    gradient = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0))
    got, want = (state_of(sum(sizes), is_split=True) for _ in range(2))
    with closing(native(8)) as many, closing(native(1)) as one:
        for _ in range(500):
            many.update(parts_of(got, sizes), gradient, params, None)
        for _ in range(500):
            one.update(parts_of(want, sizes), gradient, params, None)
    assert_same(got, want)


def test_too_many_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native_kernel._load_library()
    monkeypatch.setattr(library, "open", lambda num_helpers: None)
    with pytest.raises(MegatrainError, match="cannot start 2 threads for AdamW"):
        NativeAdamW(2, HYPER, vector=8)
