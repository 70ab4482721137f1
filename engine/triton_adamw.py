"""The update kernel of a GPU: AdamW's arithmetic of update_elements.h, in Triton.

Bit-equal to the CPU's kernel and so to torch's fused AdamW on the CPU: roundings are those of update_elements.h, and
`enable_fp_fusion=False` keeps the compiler from contracting a product and a sum into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatrain_ray.engine.adamw import AdamState, Coefficients, Hyper, Move, Rates
from megatrain_ray.engine.flat_layout import Span
from megatrain_ray.engine.journal import Part, Transaction
from megatrain_ray.engine.update_kernel import UpdateKernel, check_kernel

BLOCK = 1024
VECTOR = 8  # elements of the CPU's vectors in torch: what a parameter has beyond a multiple of them is its tail


@triton.jit(do_not_specialize=["length", "body"])
def _adamw(
    gradient, working, residual, ms, vs, length, body,
    scale, m_weight, v_keep, v_weight, root, eps, decay, step_size,
    SPLIT: tl.constexpr, HEAVY: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Elements [0, length); from `body` on they are their parameter's tail. WHOLE: they are whole blocks, and no tail;
    without masks loads are vectors. The names are those of update_elements.h."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = None if WHOLE else i < length
    g = tl.load(gradient + i, mask=inside).to(tl.float32) * scale
    m = tl.load(ms + i, mask=inside)
    v = tl.load(vs + i, mask=inside)
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
    """UpdateKernel of AdamW on the memory of the current GPU, submitted to the current stream."""

    name = "Triton"

    def __init__(self, num_threads: int, hyper: Hyper) -> None:
        """`num_threads`: means nothing here."""
        self._hyper = hyper

    def update(
        self,
        parts: Sequence[Part],
        gradient: Tensor,
        rates: Rates,
        transaction: Transaction | None,
        directions: Tensor | None = None,
    ) -> None:
        coefficients = Coefficients.of(self._hyper, rates)
        for part in parts:
            of_part = gradient[part.gradient_start : part.gradient_start + part.length]
            self._update(part, of_part, rates, coefficients)

    def _update(self, part: Part, gradient: Tensor, rates: Rates, coefficients: Coefficients) -> None:
        length = part.length
        whole, body = length // BLOCK * BLOCK, length - length % VECTOR
        move = Move.of(self._hyper, rates, part.weighting)
        if whole in (0, length):  # most are: cutting costs the host more than the launch
            self._launch(part.state, gradient, body, rates, coefficients, move)
            return
        for span in (Span(0, whole), Span(whole, length)):
            self._launch(part.state.cut(span), gradient[slice(*span)], body - span.start, rates, coefficients, move)

    def _launch(
        self, state: AdamState, gradient: Tensor, body: int, rates: Rates, coefficients: Coefficients, move: Move
    ) -> None:
        is_split, length = state.residual is not None, gradient.numel()
        _adamw[(triton.cdiv(length, BLOCK),)](
            gradient,
            state.working.view(torch.int16) if is_split else state.working,
            state.residual if is_split else state.m,
            state.m,
            state.v,
            length,
            body,
            rates.scale,
            *coefficients,
            self._hyper.eps,
            *move,
            SPLIT=is_split,
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


def open_triton(hyper: Hyper, device: torch.device) -> UpdateKernel:
    """The kernel, once it has shown itself equal to torch on the CPU. Raises MegatrainError where it is not."""
    check_kernel(partial(_FromHost, device=device), Hyper(hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay))
    return TritonAdamW(1, hyper)


class _FromHost(TritonAdamW):
    """The same on host tensors, which are brought to the device and back: for the check."""

    def __init__(self, num_threads: int, hyper: Hyper, *, device: torch.device) -> None:
        super().__init__(num_threads, hyper)
        self._device = device

    def _update(self, part: Part, gradient: Tensor, rates: Rates, coefficients: Coefficients) -> None:
        moved = AdamState(*(None if t is None else t.to(self._device) for t in part.state))  # type: ignore[arg-type]
        super()._update(part._replace(state=moved), gradient.to(self._device), rates, coefficients)
        for here, there in zip(part.state, moved, strict=True):
            if here is not None and there is not None:
                here.copy_(there)
