"""Chooses how many tokens of the loss are computed at a time, and counts the device memory that the loss takes."""

from __future__ import annotations

import math

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import Plan

# Logits of a chunk may take the largest of: this many bytes, this share of device memory, and what a layer's backward
# takes at another time. The head's gradient is summed over the chunks, so few are faster: with chunks of 512 tokens the
# sum took a third of the loss of 16 × 1024 tokens (Qwen2.5-7B's head on an H200: 146 ms).
LOGITS_BYTES = 1 << 30
LOGITS_SHARE = 1 / 48
CHUNK_TOKENS = 128  # chunks are multiples of this
MAX_LOGITS = (1 << 31) - 1  # per chunk: kernels count elements in 32 bits


def logits_bytes(
    structure: ModelStructure, precision: Precision, num_tokens: int, *, z_loss: bool, compiled: bool
) -> int:
    """Return the bytes of the logits of `num_tokens` tokens and of their gradient.

    Both are in the working type. If nothing fuses the operations between them (`compiled` is false), both exist in
    FP32, too, and a z-loss takes 4 more bytes per logit.
    """
    between = 0 if compiled else 12 if z_loss else 8
    return num_tokens * structure.vocab_size * (2 * precision.working_dtype.itemsize + between)


def chunk_tokens(
    plan: Plan, structure: ModelStructure, layout: ModelLayout, *, beside: int, backward: int, z_loss: bool
) -> int:
    """Return the number of tokens in a chunk of the loss.

    If a few chunks more make all of them equal, that is chosen, because each size is compiled.

    plan: complete but for its rows and this number.
    beside: bytes as for `loss_bytes`.
    backward: bytes that the largest backward of a layer takes.
    """
    tokens = plan.step.micro_batch_size * plan.step.seq_len
    of_one = logits_bytes(structure, plan.precision, 1, z_loss=z_loss, compiled=plan.compute.compiled_loss)
    share = max(LOGITS_BYTES, int(LOGITS_SHARE * (plan.limits.hbm_bytes or 0)))
    room = backward - beside - _gradient_bytes(plan, layout, chunked=True)
    most = min(max(share, room) // of_one, MAX_LOGITS // structure.vocab_size)
    if tokens <= most:
        return tokens
    fewest = -(-tokens // max(CHUNK_TOKENS, most // CHUNK_TOKENS * CHUNK_TOKENS))
    equal = (n for n in range(fewest, 2 * fewest) if tokens % (n * CHUNK_TOKENS) == 0)
    return -(-tokens // (next(equal, fewest) * CHUNK_TOKENS)) * CHUNK_TOKENS


def loss_bytes(plan: Plan, structure: ModelStructure, layout: ModelLayout, *, beside: int, z_loss: bool) -> int:
    """Return the device bytes of the loss: logits of a chunk, gradients of weights, and `beside`.

    beside: bytes that stay on the device for all chunks.
    """
    chunked = plan.compute.loss_chunk_tokens < plan.step.micro_batch_size * plan.step.seq_len
    logits = logits_bytes(
        structure, plan.precision, plan.compute.loss_chunk_tokens, z_loss=z_loss, compiled=plan.compute.compiled_loss
    )
    return logits + beside + _gradient_bytes(plan, layout, chunked=chunked)


def _gradient_bytes(plan: Plan, layout: ModelLayout, *, chunked: bool) -> int:
    """Return the bytes of the head's gradient, and of the gradients of tied weights.

    Each tied weight has one gradient per live micro-batch, until the backward of the layer that owns the weight.
    """
    head = layout.layers[-1]
    elements = sum(max(s.numel, math.prod(s.shape)) for s in head.segments if s.group.trained)
    tied = layout.num_tied * plan.precision.working_dtype.itemsize * plan.step.num_live_micro_batches
    return _head_bytes(plan, elements, chunked=chunked) + tied


def _head_bytes(plan: Plan, elements: int, *, chunked: bool) -> int:
    """Return the bytes of a chunk's gradient of the head's weights, and of their sum over chunks.

    If chunks add to the step's sum, they have no sum of their own. Else this is 0 with one chunk, because the backward
    counts it.
    """
    of_chunk = elements * plan.precision.working_dtype.itemsize
    if plan.compute.chunks_add_to_sums:
        return of_chunk
    return of_chunk + 4 * elements if chunked else 0
