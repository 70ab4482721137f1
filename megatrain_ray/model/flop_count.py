"""Model FLOPs of a step, from what a trial forward found: for model TFLOPS."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain_ray.engine.model.flops import BlockAttention, work_of
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.model.model_source import ModelSource

# What Transformers' configurations call the number of experts that a token goes to.
ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")


@dataclass(frozen=True)
class FlopCount:
    """Model FLOPs of a step: 6 N_matmul tokens + 6 Σ_blocks d_attn Σ len² (causal attention counted once; forward and
    backward; recomputation and pads are not counted).

    Of experts, N_matmul holds those that a token goes to. A block with a window attends to 2 window tokens at most
    where the formula has len. Layers with a state instead of attention count by their matrices alone. Where something
    is frozen a third of a matrix's goes with its gradient, and layers below the lowest trained one have a forward only.
    """

    of_token: int  # 6 N_matmul where all is trained
    attention: tuple[BlockAttention, ...]

    @staticmethod
    def of(structure: ModelStructure, source: ModelSource) -> FlopCount:
        work = work_of(structure, active_experts(source), windows(source, len(structure.blocks)))
        of_token = sum(layer.flops_of_token for layer in work)
        return FlopCount(round(of_token), tuple(layer.attention for layer in work if layer.attention))

    def per_step(self, num_tokens: int, sum_squared_lengths: int) -> float:
        of_attention = (a.passes * a.flops(num_tokens, sum_squared_lengths) for a in self.attention)
        return float(self.of_token) * num_tokens + sum(of_attention)


def active_experts(source: ModelSource) -> int | None:
    """How many a token goes to; None where there are none."""
    return next((k for name in ACTIVE_EXPERTS if (k := source.setting(name))), None)


def windows(source: ModelSource, num_blocks: int) -> tuple[int | None, ...]:
    """Of each block, in Transformers' terms."""
    window: int | None = source.setting("sliding_window")
    kinds = source.setting("layer_types")
    if not kinds:
        return (window,) * num_blocks
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
