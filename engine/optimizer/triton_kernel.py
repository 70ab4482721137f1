"""Implements a GPU's update kernel in Triton, with AdamW's arithmetic of native/update_elements.h.

It is bit-equal to the CPU's kernel, and so to torch's fused AdamW on the CPU. Its roundings are those of
native/update_elements.h, and `enable_fp_fusion=False` keeps the compiler from contracting a product and a sum into one
operation. Moments in bf16 are rounded with the random bits of stochastic_rounding.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.optimizer.adamw import (
    AdamState,
    AdamWConstants,
    Coefficients,
    ParamCoefficients,
    UpdateParams,
)
from megatrain_ray.engine.optimizer.stochastic_rounding import as_int32
from megatrain_ray.engine.optimizer.undo_log import ParamSlice, Transaction
from megatrain_ray.engine.optimizer.update_kernel import UpdateKernel, check_kernel

BLOCK = 1024
VECTOR = 8  # elements of torch's vectors on the CPU: a parameter's elements beyond a multiple of it are its tail


@triton.jit
def _random_bits(h) -> tl.tensor:
    """Apply the 32-bit finalizer of MurmurHash3 to uint32 values."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _rounded(value, random) -> tl.tensor:
    """Round FP32 stochastically to the bits of a bf16, as int16.

    random: 16 random bits, as int32.
    """
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    high = (bits + tl.where(magnitude < 0x7F7F0000, random, 0)) >> 16
    return tl.where(magnitude > 0x7F800000, 0x7FC0, high).to(tl.int16)


@triton.jit(do_not_specialize=["length", "body", "counter"])
def _adamw(
    gradient, working, residual, ms, vs, length, body, counter,
    scale, m_weight, v_keep, v_weight, root, eps, decay, step_size,
    SPLIT: tl.constexpr, NARROW: tl.constexpr, HEAVY: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Update elements [0, length). Those from `body` on are the tail of their parameter.

    WHOLE: the elements are whole blocks without a tail. Without masks, loads are vectors.

    NARROW: `ms` and `vs` are the bits of bf16, as int16.

    The names are those of native/update_elements.h.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = None if WHOLE else i < length
    g = tl.load(gradient + i, mask=inside).to(tl.float32) * scale
    m = tl.load(ms + i, mask=inside)
    v = tl.load(vs + i, mask=inside)
    if NARROW:
        m = (m.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        v = (v.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if SPLIT:
        high = tl.load(working + i, mask=inside).to(tl.int32) << 16
        p = (high + tl.load(residual + i, mask=inside).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        p = tl.load(working + i, mask=inside)
    way = g - m
    m = tl.fma(m_weight - 1.0, way, g) if HEAVY else tl.fma(m_weight, way, m)
    weighted = v_weight * g
    in_body = tl.fma(weighted, g, v * v_keep)
    if WHOLE:
        v = in_body
    else:
        v = tl.where(i < body, in_body, tl.fma(v, v_keep, weighted * g))
        if HEAVY:
            m = tl.where(i < body, m, tl.fma(-way, 1.0 - m_weight, g))
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
    following = p * decay + tl.div_rn(step_size * m, denominator)
    if NARROW:
        random = _random_bits((counter + i).to(tl.uint32))
        tl.store(ms + i, _rounded(m, (random >> 16).to(tl.int32)), mask=inside)
        tl.store(vs + i, _rounded(v, (random & 0xFFFF).to(tl.int32)), mask=inside)
    else:
        tl.store(ms + i, m, mask=inside)
        tl.store(vs + i, v, mask=inside)
    if SPLIT:
        bits = following.to(tl.int32, bitcast=True)
        half = bits + 0x8000
        nan = following != following
        tl.store(working + i, tl.where(nan, 0x7FC0, half >> 16).to(tl.int16), mask=inside)
        tl.store(residual + i, tl.where(nan, 0, bits - ((half >> 16) << 16)).to(tl.int16), mask=inside)
    else:
        tl.store(working + i, following, mask=inside)


class TritonAdamW:
    """Updates parameters in the current GPU's memory with AdamW, as an UpdateKernel on the current stream."""

    name = "Triton"

    def __init__(self, num_threads: int, hyper: AdamWConstants) -> None:
        """Create the kernel. `num_threads` is ignored."""
        self._hyper = hyper

    def update(
        self, parts: Sequence[ParamSlice], gradient: Tensor, params: UpdateParams, transaction: Transaction | None,
        directions: Tensor | None = None,
    ) -> None:  # fmt: skip
        coefficients = Coefficients.of(self._hyper, params)
        for part in parts:
            of_part = gradient[part.gradient_start : part.gradient_start + part.length]
            self._update(part, of_part, params, coefficients)

    def _update(self, part: ParamSlice, gradient: Tensor, params: UpdateParams, coefficients: Coefficients) -> None:
        length = part.length
        whole, body = length // BLOCK * BLOCK, length - length % VECTOR
        move, counter = part.coefficients(self._hyper, params), part.counter(self._hyper, params)
        if whole in (0, length):  # most parameters: cutting costs the host more than a launch
            self._launch(part.state, gradient, body, counter, params, coefficients, move)
            return
        for span in (ElementRange(0, whole), ElementRange(whole, length)):
            cut, of_span, first = part.state.cut(span), gradient[slice(*span)], span.start
            self._launch(cut, of_span, body - first, counter + first, params, coefficients, move)

    def _launch(
        self, state: AdamState, gradient: Tensor, body: int, counter: int, params: UpdateParams,
        coefficients: Coefficients, move: ParamCoefficients,
    ) -> None:  # fmt: skip
        assert state.v is not None  # only parameters that Muon trains have none
        is_split, is_narrow, length = state.residual is not None, state.m.dtype == torch.bfloat16, gradient.numel()
        m, v = (x.view(torch.int16) if is_narrow else x for x in (state.m, state.v))
        _adamw[(triton.cdiv(length, BLOCK),)](
            gradient,
            state.working.view(torch.int16) if is_split else state.working,
            state.residual if is_split else m,
            m,
            v,
            length,
            body,
            as_int32(counter),  # always of one type: another one would compile another kernel
            params.scale,
            *coefficients,
            self._hyper.eps,
            *move,
            SPLIT=is_split,
            NARROW=is_narrow,
            HEAVY=coefficients.m_weight >= 0.5,
            WHOLE=length % BLOCK == 0,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for to, source in pairs:
            to.copy_(source, non_blocking=True)

    def close(self) -> None:
        pass


def open_triton(hyper: AdamWConstants, device: torch.device) -> UpdateKernel:
    """Open the kernel, after it has proved equal to torch on the CPU. Raises MegatrainError if it does not."""
    check_kernel(partial(_FromHost, device=device), replace(hyper, muon=None))
    return TritonAdamW(1, hyper)


class _FromHost(TritonAdamW):
    """Runs the kernel on host tensors, which it copies to the device and back, for the check."""

    def __init__(self, num_threads: int, hyper: AdamWConstants, *, device: torch.device) -> None:
        super().__init__(num_threads, hyper)
        self._device = device

    def _update(self, part: ParamSlice, gradient: Tensor, params: UpdateParams, coefficients: Coefficients) -> None:
        moved = AdamState(*(None if t is None else t.to(self._device) for t in part.state))  # type: ignore[arg-type]
        super()._update(part._replace(state=moved), gradient.to(self._device), params, coefficients)
        for here, there in zip(part.state, moved, strict=True):
            if here is not None and there is not None:
                here.copy_(there)
