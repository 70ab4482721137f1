"""Model FLOPs of a step, from what a trial forward found: for model TFLOPS."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatrain_ray.engine.layout import ParameterSpec
from megatrain_ray.engine.model import LayerKind, LayerSpec, ModelStructure
from megatrain_ray.model_source import ModelSource

# What Transformers' configurations call the number of experts that a token goes to.
ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
# One expert's place in a list of experts.
_MEMBER = re.compile(r".*\.experts\.\d+(?=\.)")


class BlockAttention(NamedTuple):
    """`width`: heads × head_dim. `window`: how many tokens back a token attends to; None: all of its document.
    `passes`: a forward, and two for a backward."""

    width: float
    window: int | None
    passes: int = 3


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
        """A tied head counts as an untied one does; rows of an embedding are looked up, not multiplied."""
        active = next((k for name in ACTIVE_EXPERTS if (k := source.setting(name))), None)
        lowest, blocks = structure.lowest_trained, LayerKind.BLOCK
        of_token = sum(
            2 * elements * (1 + (index >= lowest) + parameter.group.trained)
            for index, layer in enumerate(structure.layers)
            for parameter, elements in _active_elements(layer, structure, active)
        )
        passes = [3 if i >= lowest else 1 for i, layer in enumerate(structure.layers) if layer.kind is blocks]
        windows = _windows(source, len(structure.attention_widths))
        return FlopCount(round(of_token), tuple(map(BlockAttention, structure.attention_widths, windows, passes)))

    def per_step(self, num_tokens: int, sum_squared_lengths: int) -> float:
        of_attention = (
            2.0 * a.passes * a.width * min(sum_squared_lengths, 2 * a.window * num_tokens if a.window else math.inf)
            for a in self.attention
        )
        return float(self.of_token) * num_tokens + sum(of_attention)


def _active_elements(
    layer: LayerSpec, structure: ModelStructure, active: int | None
) -> Iterator[tuple[ParameterSpec, float]]:
    """The layer's matrices, and how many elements of each one token is multiplied with."""
    num_members = Counter(match[0] for p in layer.parameters if (match := _MEMBER.search(p.name)))
    num_groups = Counter(name[: name.rindex(".experts.")] for name in num_members)
    for p in layer.parameters:
        looked_up = layer.kind is LayerKind.EMBEDDING and (p.tied_to or p.name) in structure.looked_up
        if looked_up or len(p.shape) < 2 or p.name.endswith("bias"):
            continue
        num_experts = _num_experts(p, num_groups)
        yield p, math.prod(p.shape) * min(active or num_experts, num_experts) / num_experts


def _num_experts(parameter: ParameterSpec, num_siblings: Mapping[str, int]) -> int:
    """Among which the parameter's is one, or which the parameter holds; 1: it belongs to none.

    `num_siblings`: experts by where their list is, where each has parameters of its own.
    """
    if match := _MEMBER.search(parameter.name):
        return num_siblings[match[0][: match[0].rindex(".experts.")]]
    several = len(parameter.shape) == 3 and parameter.shape[1] > 1  # with 1 it is a convolution, channel by channel
    return parameter.shape[0] if several else 1


def _windows(source: ModelSource, num_blocks: int) -> list[int | None]:
    """Of each block, in Transformers' terms."""
    window: int | None = source.setting("sliding_window")
    kinds = source.setting("layer_types")
    if not kinds:
        return [window] * num_blocks
    return [window if kind == "sliding_attention" else None for kind in kinds]
