"""Runs the native update kernel: adamw_kernel.c, compiled on first use, with threads of its own."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from megatrain_ray.engine.optimizer.adamw import AdamWConstants, Coefficients, UpdateParams
from megatrain_ray.engine.optimizer.undo_log import ParamSlice, Transaction
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.words.compile_c import declare, load_compiled

SOURCE = Path(__file__).with_name("adamw_kernel.c")
INCLUDES = tuple(map(SOURCE.with_name, ("thread_pool.h", "update_elements.h", "stochastic_rounding.h")))
# errno and traps would keep loops from being vectorised; neither changes a value.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-pthread", "-lm")
COPY_BYTES = 1 << 20  # size of a chunk, as in adamw_kernel.c
VARIANTS = ("native", "native AVX2", "native AVX-512")


class _CStructure(ctypes.Structure):
    """Mirrors a C structure. It has 8-byte members only."""


class _CPart(_CStructure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("gradient", "working", "residual", "m", "v", "direction")),
        *((name, ctypes.c_int64) for name in ("length", "first_unit", "counter")),
        *((name, ctypes.c_double) for name in ("decay", "step_size")),
    ]


class _CRates(_CStructure):
    _fields_: ClassVar = [
        *(
            (name, ctypes.c_double)
            for name in ("scale", "m_weight", "v_keep", "v_weight", "root", "eps", "muon_weight")
        ),
        *((name, ctypes.c_int64) for name in ("bf16_gradient", "bf16_moments", "vector")),
    ]


class _CJournal(_CStructure):
    _fields_: ClassVar = [
        ("serial", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("records", "marks", "rooms")),
        ("room_bytes", ctypes.c_int64),
    ]


class _CCopy(_CStructure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("to", "source")),
        *((name, ctypes.c_int64) for name in ("nbytes", "first_chunk")),
    ]


class _Library:
    """Loads the kernel's C functions. They release the GIL."""

    def __init__(self) -> None:
        library = load_compiled(SOURCE, FLAGS, ctypes.CDLL, INCLUDES)
        integer, address = ctypes.c_int64, ctypes.c_void_p
        self.open = declare(library.adamw_open, address, integer)
        self.close = declare(library.adamw_close, None, address)
        self.update = declare(library.adamw_update, None, address, integer, address, integer, integer, address, address)
        self.copy = declare(library.adamw_copy, None, address, address, integer)
        self.best_variant = declare(library.adamw_best_variant, integer)


_load_library = functools.cache(_Library)


class NativeAdamW:
    """Runs AdamW and Muon in C, as an UpdateKernel."""

    def __init__(self, num_threads: int, hyper: AdamWConstants, *, vector: int) -> None:
        """Load the library and start the threads.

        num_threads: the caller's own thread is one of them.
        vector: number of elements in torch's vectors on this machine. torch rounds a parameter's elements beyond a
            multiple of it differently. The right number is found by trial: `check_kernel` fails for a wrong one.

        Raises OSError or CompileError if the file cannot be built or loaded, MegatrainError if the threads cannot be
        started.
        """
        self._hyper = hyper
        self._vector = vector
        self._library = _load_library()
        self._variant = self._library.best_variant()
        self._pool = self._library.open(num_threads - 1)
        if not self._pool:
            raise MegatrainError(f"cannot start {num_threads} threads for AdamW: raise the limit (ulimit -u)")
        self._close = weakref.finalize(self, self._library.close, self._pool)
        self._close.atexit = False  # not at exit: a daemon thread may be inside an update then

    @property
    def name(self) -> str:
        return VARIANTS[self._variant]

    def update(
        self,
        parts: Sequence[ParamSlice],
        gradient: Tensor,
        params: UpdateParams,
        transaction: Transaction | None,
        directions: Tensor | None = None,
    ) -> None:
        if not parts:
            return
        self._library.update(
            self._pool,
            self._variant,
            (_CPart * len(parts))(*(self._part(part, gradient, params, directions) for part in parts)),
            len(parts),
            parts[-1].units.stop - parts[0].first_unit,
            ctypes.byref(self._rates(params, gradient.dtype)),
            ctypes.byref(_CJournal(transaction.serial, *transaction.journal.addresses)) if transaction else None,
        )

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        copies, num_chunks = [], 0
        for to, source in pairs:
            copies.append(_CCopy(to.data_ptr(), source.data_ptr(), source.nbytes, num_chunks))
            num_chunks += -(-source.nbytes // COPY_BYTES)
        self._library.copy(self._pool, (_CCopy * len(copies))(*copies), num_chunks)

    def close(self) -> None:
        self._close()

    def _part(self, part: ParamSlice, gradient: Tensor, params: UpdateParams, directions: Tensor | None) -> _CPart:
        state, moved = part.state, directions if part.by_muon else None
        return _CPart(
            gradient.data_ptr() + part.gradient_start * gradient.element_size(),
            state.working.data_ptr(),
            None if state.residual is None else state.residual.data_ptr(),
            state.m.data_ptr(),
            None if state.v is None else state.v.data_ptr(),
            None if moved is None else moved.data_ptr() + part.gradient_start * moved.element_size(),
            part.length,
            part.first_unit,
            part.counter(self._hyper, params),
            **part.coefficients(self._hyper, params)._asdict(),
        )

    def _rates(self, params: UpdateParams, gradient_dtype: torch.dtype) -> _CRates:
        muon = self._hyper.muon
        return _CRates(
            scale=params.scale,
            **Coefficients.of(self._hyper, params)._asdict(),
            eps=self._hyper.eps,
            muon_weight=1 - muon.momentum if muon else 0.0,
            bf16_gradient=gradient_dtype == torch.bfloat16,
            bf16_moments=self._hyper.moments_seed is not None,
            vector=self._vector,
        )
