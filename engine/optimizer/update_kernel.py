"""Defines the interface of update kernels, and chooses the native one if it proves equal to torch, bit for bit."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.split_master import split
from megatrain_ray.engine.optimizer.adamw import AdamState, AdamWConstants, ParamWeighting, UpdateParams
from megatrain_ray.engine.optimizer.native.native_kernel import NativeAdamW
from megatrain_ray.engine.optimizer.torch_kernel import BlockPool, Scratch, TorchBlocks, update_block
from megatrain_ray.engine.optimizer.undo_log import UNIT_ELEMENTS, ParamSlice, Transaction, num_units
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.words.compile_c import CompileError

log = logging.getLogger(__name__)

# Sizes of the check's parameters: bodies and tails for vectors of up to 16 elements, and one cut by the end of a unit.
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 63, 1007, UNIT_ELEMENTS + 29, 64)
# Specials, denormals, the largest and the smallest normal number, and a tie when a master is split.
AWKWARD = (
    float("nan"), float("inf"), -float("inf"), 0.0, -0.0,
    1e-40, -1e-45, 3.4028235e38, -1.17549435e-38, 1.00390625,
)  # fmt: skip
AWKWARD_EVERY = 13


class UpdateKernel(Protocol):
    """Updates a shard's part of a layer.

    Only one caller at a time. Any kernel can finish a transaction that another one began.
    """

    @property
    def name(self) -> str: ...

    def update(
        self, parts: Sequence[ParamSlice], gradient: Tensor, params: UpdateParams, transaction: Transaction | None,
        directions: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Update the units that are not marked. Without a transaction, update all; a kill then tears some.

        parts: their units ascend without a gap, from any number on.
        gradient: of the layer, 1-D, padded, bf16 or fp32; only read.
        directions: bf16, as large as `gradient`, if Muon trains one of the parts; only read.
        """

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy the second tensor of each pair (uint8, 1-D, contiguous) over the first, with all threads."""

    def close(self) -> None:
        """Stop the threads. Idempotent."""


Build = Callable[[int, AdamWConstants], UpdateKernel]  # (number of threads, constants) → kernel
# Possible lengths of torch's vectors, in elements. torch 2.13 has 8 in fused AdamW on AVX-512 too; 4 is NEON's.
NATIVE: tuple[Build, ...] = tuple(partial(NativeAdamW, vector=vector) for vector in (8, 16, 4))


def open_kernel(num_threads: int, hyper: AdamWConstants, candidates: tuple[Build, ...] = NATIVE) -> UpdateKernel:
    """Open the first candidate that equals torch on this machine, or torch in blocks if none does.

    In the second case it logs a warning, once, that says why.
    """
    return _proven(hyper, candidates)(num_threads, hyper)


@functools.cache
def _proven(hyper: AdamWConstants, candidates: tuple[Build, ...]) -> Build:
    reasons = []
    for build in candidates:
        try:
            check_kernel(build, hyper)
        except (OSError, CompileError, MegatrainError) as error:
            reasons.append(str(error))
        else:
            return build
    log.warning("AdamW runs in torch blocks, which is slower: %s", "; ".join(dict.fromkeys(reasons)))
    return TorchBlocks


def check_kernel(build: Build, hyper: AdamWConstants) -> None:
    """Raise MegatrainError with the first difference between a kernel and torch.

    The kernel is compared with torch's fused AdamW, and with torch's operations of Muon if `hyper` has Muon's
    constants. The check takes milliseconds.
    """
    with closing(build(1, hyper)) as kernel, closing(BlockPool(1)) as pool:
        # In a thread with one torch thread: on busy cores, waking others would cost more than the whole check.
        pool.run([partial(_check, kernel, hyper)])


def _check(kernel: UpdateKernel, hyper: AdamWConstants, scratch: Scratch) -> None:
    modes = itertools.product((True, False), (torch.bfloat16, torch.float32), (1.0, 0.3), (1, 1000))
    for is_split, dtype, scale, step in modes:
        params = UpdateParams(step, step, 1e-3, float(torch.tensor(scale)))
        gradient, directions = _values(0, 1e-2).to(dtype), _values(4, 0.1).bfloat16()
        got, want = list(_parts(is_split, hyper)), list(_parts(is_split, hyper))
        kernel.update(got, gradient, params, None, directions)
        for part, expected in zip(got, want, strict=True):
            update_block(expected, ElementRange(0, expected.length), gradient, directions, hyper, params, scratch)
            if names := _different(part.state, expected.state):
                raise MegatrainError(
                    f"{kernel.name} differs from torch {torch.__version__} in {', '.join(names)} of a parameter of "
                    f"{part.length} elements ({'split' if is_split else 'fp32'} master, {dtype} gradient, "
                    f"scale {scale}, step {step})"
                )


def _parts(is_split: bool, hyper: AdamWConstants) -> Iterator[ParamSlice]:
    """Yield one parameter of each size, with values that are the same in every call.

    Every second one decays, and every third one has another learning rate. With Muon there is one more of each size,
    which Muon trains.
    """
    dtype = torch.float32 if hyper.moments_seed is None else torch.bfloat16
    master, m, v = _values(1, 1.0), _values(2, 1e-3).to(dtype), _values(3, 1e-5).abs_().to(dtype)
    working, residual = split(master) if is_split else (master, None)
    whole, start, unit = AdamState(working, residual, m, v), 0, 0
    for index, size in enumerate(SIZES * (2 if hyper.muon else 1)):
        lr_ratio = 1.7 if index >= len(SIZES) else 1.0
        weighting = ParamWeighting(0.3 if index % 3 == 2 else 1.0, hyper.weight_decay * (index % 2), lr_ratio)
        state = whole.cut(ElementRange(start, start + size))
        if index >= len(SIZES):
            state = state._replace(v=None)
        yield ParamSlice(state, start, weighting, unit, f"of {size}", start)
        start, unit = start + size, unit + num_units(size)


def _values(seed: int, scale: float) -> Tensor:
    """Return values for all parts, with an awkward one here and there. No element is awkward in all tensors."""
    values = torch.randn(2 * sum(SIZES), generator=torch.Generator().manual_seed(seed)) * scale
    awkward = values[3 * seed :: AWKWARD_EVERY]
    awkward.copy_(torch.tensor(AWKWARD).repeat(awkward.numel() // len(AWKWARD) + 1)[: awkward.numel()])
    return values


def _different(a: AdamState, b: AdamState) -> list[str]:
    tensors = zip(AdamState._fields, a, b, strict=True)
    signed = a.v is not None  # torch's zeros in Muon's momentum have a sign or not, by where its vectors end
    return [
        name for name, x, y in tensors if x is not None and y is not None and not _equal(x, y, signed or name != "m")
    ]


def _equal(a: Tensor, b: Tensor, signed: bool) -> bool:
    """Return whether two tensors are equal bit for bit. Zeros of either sign count as equal unless `signed`.

    FP32 NaNs count as equal: no compiler promises which operand's sign and payload they keep.
    """
    integer = torch.int32 if a.dtype == torch.float32 else torch.int16
    same = a.view(integer) == b.view(integer)
    if a.dtype == torch.float32:
        same |= a.isnan() & b.isnan()
    if not signed:
        same |= a == b
    return bool(same.all())
