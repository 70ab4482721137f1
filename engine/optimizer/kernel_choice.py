"""Chooses a shard's update kernel: the native one if it proves equal to torch, else torch in blocks."""

from __future__ import annotations

import functools
import logging
from functools import partial

from megatrain_ray.engine.optimizer.adamw import Hyper
from megatrain_ray.engine.optimizer.native.native_kernel import NativeAdamW
from megatrain_ray.engine.optimizer.torch_kernel import TorchBlocks
from megatrain_ray.engine.optimizer.update_kernel import Build, UpdateKernel, check_kernel
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.words.compile_c import CompileError

# Possible lengths of torch's vectors, in elements. torch 2.13 has 8 in fused AdamW on AVX-512 too; 4 is NEON's.
NATIVE: tuple[Build, ...] = tuple(partial(NativeAdamW, vector=vector) for vector in (8, 16, 4))

log = logging.getLogger(__name__)


def open_kernel(num_threads: int, hyper: Hyper, candidates: tuple[Build, ...] = NATIVE) -> UpdateKernel:
    """Open the first candidate that equals torch on this machine, or torch in blocks if none does.

    In the second case it logs a warning, once, that says why.
    """
    return _proven(hyper, candidates)(num_threads, hyper)


@functools.cache
def _proven(hyper: Hyper, candidates: tuple[Build, ...]) -> Build:
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
