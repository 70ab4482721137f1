"""How many tokens of a large micro-batch an MLP computes at a time."""

from __future__ import annotations

from megatrain_ray.engine.model.structure import ModelStructure

# With so many a product is as fast as a larger one, and the gradient of the weights, which every chunk adds to a sum in
# FP32, is small beside it: of Qwen2.5-7B's MLP 2 GB read and written where the chunk's products take 20 ms on an H200.
CHUNK_TOKENS = 16384
MAX_ELEMENTS = (1 << 31) - 1  # of a tensor: kernels count elements in 32 bits


def is_long(seq_len: int) -> bool:
    """Whether a micro-batch of one such sequence is several chunks."""
    return seq_len >= 2 * CHUNK_TOKENS


def may_chunk(tokens: int, seq_len: int, *, has_disk: bool) -> bool:
    """Whether a micro-batch of so many tokens may be computed in chunks. Shorter sequences fit by smaller
    micro-batches, whose gradients are summed in FP32 and wait as such; where that much more would go to the disk chunks
    may be the faster way."""
    return tokens >= 2 * CHUNK_TOKENS and (has_disk or is_long(seq_len))


def mlp_chunk_tokens(structure: ModelStructure, tokens: int) -> int:
    """Of a micro-batch of so many: as equal as can be, in multiples of 128; 0: the model has no MLP to divide."""
    widths = [layer.mlp.width for layer in structure.layers if layer.mlp]
    if not widths:
        return 0
    most = min(CHUNK_TOKENS, MAX_ELEMENTS // max(widths))
    num_chunks = -(-tokens // most)
    return min(most, -(-tokens // (128 * num_chunks)) * 128)
