"""Chooses how many tokens of a large micro-batch an MLP computes at a time."""

from __future__ import annotations

from megatrain_ray.engine.model.structure import ModelStructure

# With this many tokens a product is as fast as a larger one. The gradient of the weights, which every chunk adds to an
# FP32 sum, takes little time beside it: 2 GB are read and written for Qwen2.5-7B's MLP while the products of a chunk
# take 20 ms on an H200.
CHUNK_TOKENS = 16384
MAX_ELEMENTS = (1 << 31) - 1  # of a tensor: kernels count elements in 32 bits


def is_long(seq_len: int) -> bool:
    """Return whether a micro-batch of one sequence of this length is several chunks."""
    return seq_len >= 2 * CHUNK_TOKENS


def may_chunk(tokens: int, seq_len: int, *, has_disk: bool) -> bool:
    """Return whether the MLPs of a micro-batch of `tokens` tokens may be computed in chunks.

    Shorter sequences fit by smaller micro-batches instead. The gradients of those are summed in FP32 and wait in FP32.
    If these larger gradients would go to the disk, chunks may be faster, so they are allowed there.
    """
    return tokens >= 2 * CHUNK_TOKENS and (has_disk or is_long(seq_len))


def mlp_chunk_tokens(structure: ModelStructure, tokens: int) -> int:
    """Return the tokens in a chunk for a micro-batch of `tokens` tokens; 0 if the model has no MLP to divide.

    Chunks are as equal as possible, in multiples of 128.
    """
    widths = [layer.mlp.width for layer in structure.layers if layer.mlp]
    if not widths:
        return 0
    most = min(CHUNK_TOKENS, MAX_ELEMENTS // max(widths))
    num_chunks = -(-tokens // most)
    return min(most, -(-tokens // (128 * num_chunks)) * 128)
