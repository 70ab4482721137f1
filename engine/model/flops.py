"""Counts what each layer computes with its matrices and in its attention, for model FLOPs and for predictions."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatrain_ray.engine.layout.expert_names import whole_name
from megatrain_ray.engine.layout.flat_layout import ParameterSpec
from megatrain_ray.engine.model.structure import LayerKind, LayerSpec, ModelStructure

# Path of one expert in a list of experts.
_MEMBER = re.compile(r".*\.experts\.\d+(?=\.)")


class Product(NamedTuple):
    """Describes the products of one matrix with tokens.

    elements: elements that one token is multiplied with; of experts, only those that it is routed to.
    trained: whether the matrix is trained.
    of_mlp: whether it belongs to the part of a block that can be computed in chunks of tokens.
    """

    elements: float
    trained: bool
    of_mlp: bool = False


class BlockAttention(NamedTuple):
    """Describes the attention of one layer.

    width: heads × head_dim.
    window: how many tokens back a token attends to; None: all of its document.
    passes: 1 for a forward, and 2 more for a backward.
    """

    width: float
    window: int | None
    passes: int = 3

    def flops(self, num_tokens: int, sum_squared_lengths: int) -> float:
        """Return the FLOPs of one pass. Causal attention counts half of all pairs of tokens.

        num_tokens: tokens of all documents.
        sum_squared_lengths: sum over all documents of their squared lengths in tokens.
        """
        most = 2 * self.window * num_tokens if self.window else math.inf
        return 2.0 * self.width * min(sum_squared_lengths, most)


@dataclass(frozen=True)
class LayerWork:
    """Describes what one layer computes.

    attention: None if the layer does not attend.
    has_backward: whether a gradient reaches the layer.
    """

    products: tuple[Product, ...]
    attention: BlockAttention | None
    has_backward: bool

    @property
    def flops_of_token(self) -> float:
        """Return the FLOPs per token of all products, forward and backward. Frozen matrices get no gradient."""
        return sum(2 * p.elements * (1 + self.has_backward + p.trained) for p in self.products)

    def flops(self, num_tokens: int, sum_squared_lengths: int) -> float:
        """Return the model FLOPs of a step; recomputation is not counted. Arguments as for BlockAttention.flops."""
        attention = self.attention
        of_attention = attention.passes * attention.flops(num_tokens, sum_squared_lengths) if attention else 0.0
        return self.flops_of_token * num_tokens + of_attention


def work_of(
    structure: ModelStructure, active_experts: int | None = None, windows: Sequence[int | None] = ()
) -> tuple[LayerWork, ...]:
    """Return what each layer computes.

    A tied head computes as much as an untied one. Rows of an embedding are looked up, not multiplied.

    active_experts: how many experts a token is routed to; None: all.
    windows: attention window of each block in tokens; empty: none has one.
    """
    lowest, attention = structure.lowest_trained, dict[int, BlockAttention]()
    every_window = windows or [None] * len(structure.blocks)
    of_layers = [(i, window) for block, window in zip(structure.blocks, every_window, strict=False) for i in block]
    for (i, window), width in zip(of_layers, structure.attention_widths, strict=False):
        attention[i] = BlockAttention(width, window, 3 if i >= lowest else 1)
    stacks = _stacks(structure)
    return tuple(
        LayerWork(tuple(_products(layer, structure, stacks, active_experts)), attention.get(i), i >= lowest)
        for i, layer in enumerate(structure.layers)
    )


def _stacks(structure: ModelStructure) -> Mapping[str, int]:
    """Return the number of experts in each stack of experts, by the name of the whole stack.

    Ranges of a stack are added up, whatever layers they are in.
    """
    several = [p for layer in structure.layers for p in layer.parameters if len(p.shape) == 3]
    found: Counter[str] = Counter()
    for p in several:
        # A stack of matrices with one row each is the weight of a depthwise convolution.
        found[whole_name(p.name)] += p.shape[0] if p.shape[1] > 1 else 1
    return found


def _products(
    layer: LayerSpec, structure: ModelStructure, stacks: Mapping[str, int], active: int | None
) -> Iterator[Product]:
    num_members = Counter(match[0] for p in layer.parameters if (match := _MEMBER.search(p.name)))
    num_groups = Counter(name[: name.rindex(".experts.")] for name in num_members)
    for p in layer.parameters:
        looked_up = layer.kind is LayerKind.EMBEDDING and (p.tied_to or p.name) in structure.looked_up
        if looked_up or len(p.shape) < 2 or p.name.endswith("bias"):
            continue
        num_experts = _num_experts(p, num_groups, stacks)
        elements = math.prod(p.shape) * min(active or num_experts, num_experts) / num_experts
        of_mlp = layer.mlp is not None and p.local.startswith(f"{layer.mlp.path}.")
        yield Product(elements, p.group.trained, of_mlp)


def _num_experts(parameter: ParameterSpec, num_siblings: Mapping[str, int], stacks: Mapping[str, int]) -> int:
    """Return how many experts the parameter's list or stack of experts has; 1: it belongs to no expert.

    num_siblings: number of experts by the path of their list, where each expert has parameters of its own.
    stacks: from `_stacks`.
    """
    if match := _MEMBER.search(parameter.name):
        return num_siblings[match[0][: match[0].rindex(".experts.")]]
    return stacks.get(whole_name(parameter.name), 1)
