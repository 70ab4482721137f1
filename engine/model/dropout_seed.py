"""Computes the seeds of dropout's random numbers. A pure function, so that any order of work draws the same numbers."""

from __future__ import annotations

from megatrain_ray.io.batching.splitmix import splitmix64_chain


def dropout_seed(seed: int, step: int, micro_batch: int, layer: int, call: int) -> int:
    """Return a 63-bit seed: the splitmix64 chain of the arguments, without its last bit.

    step: counts from 1.
    micro_batch: counts from 0 over all ranks.
    layer: 0 for the embedding, 1..N for the decoder layers, N + 1 for the final norm and the head.
    call: 0 before that layer runs and 1 after it.
    """
    return splitmix64_chain(seed, step, micro_batch, layer, call) >> 1
