"""Runs the native update kernel: adamw_kernel.c, compiled on first use, with threads of its own."""

from __future__ import annotations

import ctypes
import functools
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path

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


# The C structures of the same names: addresses (P), integers of 64 bits (q) and doubles (d), in their order.
PART = struct.Struct("@6P3q2d")
RATES = struct.Struct("@7d3q")
JOURNAL = struct.Struct("@q3Pq")
COPY = struct.Struct("@2P2q")


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
        self, parts: Sequence[ParamSlice], gradient: Tensor, params: UpdateParams, transaction: Transaction | None,
        directions: Tensor | None = None,
    ) -> None:  # fmt: skip
        if not parts:
            return
        self._library.update(
            self._pool,
            self._variant,
            b"".join(self._part(part, gradient, params, directions) for part in parts),
            len(parts),
            parts[-1].units.stop - parts[0].first_unit,
            self._rates(params, gradient.dtype),
            JOURNAL.pack(transaction.serial, *transaction.journal.addresses) if transaction else None,
        )

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        copies, num_chunks = [], 0
        for to, source in pairs:
            copies.append(COPY.pack(to.data_ptr(), source.data_ptr(), source.nbytes, num_chunks))
            num_chunks += -(-source.nbytes // COPY_BYTES)
        self._library.copy(self._pool, b"".join(copies), num_chunks)

    def close(self) -> None:
        self._close()

    def _part(self, part: ParamSlice, gradient: Tensor, params: UpdateParams, directions: Tensor | None) -> bytes:
        return PART.pack(
            _address(gradient, part.gradient_start),
            *map(_address, part.state),
            _address(directions if part.by_muon else None, part.gradient_start),
            part.length,
            part.first_unit,
            part.counter(self._hyper, params),
            *part.coefficients(self._hyper, params),
        )

    def _rates(self, params: UpdateParams, gradient_dtype: torch.dtype) -> bytes:
        muon = self._hyper.muon
        return RATES.pack(
            params.scale,
            *Coefficients.of(self._hyper, params),
            self._hyper.eps,
            1 - muon.momentum if muon else 0.0,
            gradient_dtype == torch.bfloat16,
            self._hyper.moments_seed is not None,
            self._vector,
        )


def _address(tensor: Tensor | None, element: int = 0) -> int:
    return 0 if tensor is None else tensor.data_ptr() + element * tensor.element_size()
