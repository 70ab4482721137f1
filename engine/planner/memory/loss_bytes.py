"""What the loss takes on the device, and how many tokens of it at a time."""

from __future__ import annotations

import math

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import Plan

# Logits of a chunk may take this much; or this share of the device's memory, or what a layer's backward takes at
# another time, where that is more. The head's gradient is summed over the chunks: of 512 tokens each that took a third
# of the loss of 16 × 1024 tokens (Qwen2.5-7B's head on an H200: 146 ms).
LOGITS_BYTES = 1 << 30
LOGITS_SHARE = 1 / 48
CHUNK_TOKENS = 128  # or a multiple
MAX_LOGITS = (1 << 31) - 1  # in a chunk: kernels count elements in 32 bits


def logits_bytes(
    structure: ModelStructure, precision: Precision, num_tokens: int, *, z_loss: bool, compiled: bool
) -> int:
    """Logits of so many tokens and their gradient in the working type; if nothing fuses what is between them, both in
    FP32, too, and those of a z-loss."""
    between = 0 if compiled else 12 if z_loss else 8
    return num_tokens * structure.vocab_size * (2 * precision.working_dtype.itemsize + between)


def chunk_tokens(
    plan: Plan, structure: ModelStructure, layout: ModelLayout, *, beside: int, backward: int, z_loss: bool
) -> int:
    """Equal chunks where a few more make them so: each size is compiled. `plan`: all of it but its rows and this.
    `beside`: bytes as for `loss_bytes`; `backward`: what a layer's takes."""
    tokens = plan.micro_batch_size * plan.seq_len
    of_one = logits_bytes(structure, plan.precision, 1, z_loss=z_loss, compiled=plan.compiled_loss)
    share = max(LOGITS_BYTES, int(LOGITS_SHARE * (plan.hbm_limit_bytes or 0)))
    room = backward - beside - _gradient_bytes(plan, layout, chunked=True)
    most = min(max(share, room) // of_one, MAX_LOGITS // structure.vocab_size)
    if tokens <= most:
        return tokens
    fewest = -(-tokens // max(CHUNK_TOKENS, most // CHUNK_TOKENS * CHUNK_TOKENS))
    equal = (n for n in range(fewest, 2 * fewest) if tokens % (n * CHUNK_TOKENS) == 0)
    return -(-tokens // (next(equal, fewest) * CHUNK_TOKENS)) * CHUNK_TOKENS


def loss_bytes(plan: Plan, structure: ModelStructure, layout: ModelLayout, *, beside: int, z_loss: bool) -> int:
    """Logits of a chunk, gradients of weights, and what is `beside` them all the time."""
    chunked = plan.loss_chunk_tokens < plan.micro_batch_size * plan.seq_len
    logits = logits_bytes(structure, plan.precision, plan.loss_chunk_tokens, z_loss=z_loss, compiled=plan.compiled_loss)
    return logits + beside + _gradient_bytes(plan, layout, chunked=chunked)


def _gradient_bytes(plan: Plan, layout: ModelLayout, *, chunked: bool) -> int:
    """The head's gradient, and one of every tied weight for each micro-batch whose owner of it has not had its
    backward."""
    head = layout.layers[-1]
    elements = sum(max(s.numel, math.prod(s.shape)) for s in head.segments if s.group.trained)
    tied = layout.num_tied * plan.precision.working_dtype.itemsize * plan.num_live_micro_batches
    return _head_bytes(plan, elements, chunked=chunked) + tied


def _head_bytes(plan: Plan, elements: int, *, chunked: bool) -> int:
    """A chunk's gradient of the head's weights, and their sum over chunks; with one chunk a backward counts it."""
    of_chunk = elements * plan.precision.working_dtype.itemsize
    if plan.chunks_add_to_sums:
        return of_chunk
    return of_chunk + 4 * elements if chunked else 0
