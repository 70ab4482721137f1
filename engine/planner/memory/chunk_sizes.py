"""Chooses how many tokens the loss and MLPs compute at a time, and counts the bytes of the loss. Pure."""

from __future__ import annotations

import math

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.request import ObjectiveBytes

# Logits of a chunk may take the largest of: this many bytes, this share of device memory, and what a layer's backward
# takes at another time. The head's gradient is summed over the chunks, so few are faster: with chunks of 512 tokens the
# sum took a third of the loss of 16 × 1024 tokens (Qwen2.5-7B's head on an H200: 146 ms).
LOGITS_BYTES = 1 << 30
LOGITS_SHARE = 1 / 48
# On a device that this many bytes are a large share of, small logits may leave room for larger micro-batches. Products
# of 1024 tokens take less time than their launches: Llama-3-8B in 8.8 GiB makes 444 model TFLOPS with 16 micro-batches
# of four sequences, and 306 with 64 of one.
SMALL_LOGITS_SHARE = 1 / 32
LOSS_CHUNK_TOKENS = 128  # chunks are multiples of this
MAX_LOGITS = (1 << 31) - 1  # per chunk: kernels count elements in 32 bits


def logits_bytes(
    structure: ModelStructure, precision: Precision, num_tokens: int, objective_bytes: int, *, compiled: bool
) -> int:
    """Return the bytes of the logits of `num_tokens` tokens and of their gradient.

    Both are in the working type. If nothing fuses the operations between them (`compiled` is false), both exist in
    FP32, too.

    objective_bytes: `ObjectiveBytes.per_logit`.
    """
    between = objective_bytes + (0 if compiled else 8)
    return num_tokens * structure.num_logits * (2 * precision.working_dtype.itemsize + between)


def chunk_tokens(
    plan: Plan, structure: ModelStructure, layout: ModelLayout, *, held: int, backward: int,
    objective: ObjectiveBytes, small: bool = False,
) -> int:  # fmt: skip
    """Return the number of tokens in a chunk of the loss.

    If a few chunks more make all of them equal, that is chosen, because each size is compiled.

    plan: complete but for its rows and this number.
    held: bytes as for `loss_bytes`.
    backward: bytes that the largest backward of a layer takes.
    small: logits take as few bytes as is sensible.
    """
    tokens = plan.step.micro_batch_size * plan.step.seq_len
    logit_bytes = logits_bytes(structure, plan.precision, 1, objective.per_logit, compiled=plan.compute.compiled_loss)
    device = plan.limits.hbm_bytes or 0
    share = int(SMALL_LOGITS_SHARE * device) if small else max(LOGITS_BYTES, int(LOGITS_SHARE * device))
    room = backward - held - _gradient_bytes(plan, layout, chunked=True)
    most = min(max(share, room) // logit_bytes, MAX_LOGITS // structure.num_logits)
    if tokens <= most:
        return tokens
    fewest = -(-tokens // max(LOSS_CHUNK_TOKENS, most // LOSS_CHUNK_TOKENS * LOSS_CHUNK_TOKENS))
    equal = (n for n in range(fewest, 2 * fewest) if tokens % (n * LOSS_CHUNK_TOKENS) == 0)
    return -(-tokens // (next(equal, fewest) * LOSS_CHUNK_TOKENS)) * LOSS_CHUNK_TOKENS


def may_be_small(device_bytes: int | None) -> bool:
    """Return whether logits that take fewer bytes than usual may be worth their time on a device of this size."""
    return device_bytes is not None and SMALL_LOGITS_SHARE * device_bytes < LOGITS_BYTES / 2


def loss_bytes(
    plan: Plan, structure: ModelStructure, layout: ModelLayout, objective: ObjectiveBytes, *, held: int
) -> int:
    """Return the device bytes of the loss: logits of a chunk, gradients of weights, and `held`.

    held: bytes that stay on the device for all chunks.
    """
    chunked = plan.compute.loss_chunk_tokens < plan.step.micro_batch_size * plan.step.seq_len
    logits = logits_bytes(
        structure,
        plan.precision,
        plan.compute.loss_chunk_tokens,
        objective.per_logit,
        compiled=plan.compute.compiled_loss,
    )
    return logits + held + _gradient_bytes(plan, layout, chunked=chunked)


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
    chunk_bytes = elements * plan.precision.working_dtype.itemsize
    if plan.compute.chunks_add_to_sums:
        return chunk_bytes
    return chunk_bytes + 4 * elements if chunked else 0


# With this many tokens a product is as fast as a larger one. The gradient of the weights, which every chunk adds to an
# FP32 sum, takes little time beside it: 2 GB are read and written for Qwen2.5-7B's MLP while the products of a chunk
# take 20 ms on an H200.
MLP_CHUNK_TOKENS = 16384
MAX_ELEMENTS = (1 << 31) - 1  # of a tensor: kernels count elements in 32 bits


def is_long(seq_len: int) -> bool:
    """Return whether a micro-batch of one sequence of this length is several chunks."""
    return seq_len >= 2 * MLP_CHUNK_TOKENS


def may_chunk(tokens: int, seq_len: int, *, has_disk: bool) -> bool:
    """Return whether the MLPs of a micro-batch of `tokens` tokens may be computed in chunks.

    Shorter sequences fit by smaller micro-batches instead. The gradients of those are summed in FP32 and wait in FP32.
    If these larger gradients would go to the disk, chunks may be faster, so they are allowed there.
    """
    return tokens >= 2 * MLP_CHUNK_TOKENS and (has_disk or is_long(seq_len))


def mlp_chunk_tokens(structure: ModelStructure, tokens: int) -> int:
    """Return the tokens in a chunk for a micro-batch of `tokens` tokens; 0 if the model has no MLP to divide.

    Chunks are as equal as possible, in multiples of 128.
    """
    widths = [layer.mlp.width for layer in structure.layers if layer.mlp]
    if not widths:
        return 0
    most = min(MLP_CHUNK_TOKENS, MAX_ELEMENTS // max(widths))
    num_chunks = -(-tokens // most)
    return min(most, -(-tokens // (128 * num_chunks)) * 128)
