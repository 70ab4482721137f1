"""Counts the model FLOPs of a step from the results of a trial forward, for model TFLOPS."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain_ray.engine.model.flops import BlockAttention, work_of
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.model.model_source import ModelSource

# Names in Transformers' configurations for the number of experts that a token goes to.
ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")


@dataclass(frozen=True)
class FlopCount:
    """Holds the model FLOPs of a step: 6 N_matmul tokens + 6 Σ_blocks d_attn Σ len².

    Causal attention is counted once, forward and backward; recomputation and pads are not counted. Of experts, N_matmul
    holds those that a token goes to. For a block with a sliding window, 2 window tokens replace len in the formula if
    that is less. Layers with a state instead of attention count only by their matrices. A frozen matrix counts two
    thirds, because its gradient is not computed. Layers below the lowest trained one count only a forward. Of a vision
    tower that runs in steps the matrices count, for tokens of images, but not its attention.
    """

    of_token: int  # FLOPs per token, without attention: 6 N_matmul if everything is trained
    attention: tuple[BlockAttention, ...]
    of_image_token: int = 0  # more FLOPs of a token that is one of an image

    @staticmethod
    def of(structure: ModelStructure, source: ModelSource) -> FlopCount:
        work = work_of(structure, active_experts(source), windows(source, len(structure.blocks)))
        of_token, more = (sum(x.flops_of_token for x in work if x.of_images is which) for which in (False, True))
        return FlopCount(round(of_token), tuple(layer.attention for layer in work if layer.attention), round(more))

    def per_step(self, num_tokens: int, sum_squared_lengths: int, num_image_tokens: int = 0) -> float:
        of_attention = (a.passes * a.flops(num_tokens, sum_squared_lengths) for a in self.attention)
        of_images = float(self.of_image_token) * num_image_tokens
        return float(self.of_token) * num_tokens + of_images + sum(of_attention)


def active_experts(source: ModelSource) -> int | None:
    """Return how many experts a token goes to; None if the model has no experts."""
    return next((k for name in ACTIVE_EXPERTS if (k := source.setting(name))), None)


def windows(source: ModelSource, num_blocks: int) -> tuple[int | None, ...]:
    """Return the sliding window of each block in tokens, as Transformers defines it; None: the block has none."""
    window: int | None = source.setting("sliding_window")
    kinds = source.setting("layer_types")
    if not kinds:
        return (window,) * num_blocks
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
