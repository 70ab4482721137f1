"""How many tokens of a long sequence an MLP computes at a time."""

from __future__ import annotations

from megatrain_ray.engine.model import ModelStructure

# With so many a product is as fast as a larger one, and the gradient of the weights, which every chunk adds to a sum in
# FP32, is small beside it: of Qwen2.5-7B's MLP 2 GB read and written where the chunk's products take 20 ms on an H200.
CHUNK_TOKENS = 16384
MAX_ELEMENTS = (1 << 31) - 1  # of a tensor: kernels count elements in 32 bits


def may_chunk(seq_len: int) -> bool:
    """Whether sequences are so long that a micro-batch of one is several chunks; shorter ones fit by smaller
    micro-batches."""
    return seq_len >= 2 * CHUNK_TOKENS


def mlp_chunk_tokens(structure: ModelStructure, micro_batch_size: int, seq_len: int) -> int:
    """As equal as can be, in multiples of 128; 0: nothing is computed in chunks."""
    widths = [layer.mlp.width for layer in structure.layers if layer.mlp]
    if not widths or not may_chunk(seq_len):
        return 0
    tokens = micro_batch_size * seq_len
    most = min(CHUNK_TOKENS, MAX_ELEMENTS // max(widths))
    num_chunks = -(-tokens // most)
    return min(most, -(-tokens // (128 * num_chunks)) * 128)
