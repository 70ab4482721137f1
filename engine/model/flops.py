"""Counts what each layer computes with its matrices and in its attention, for model FLOPs and for predictions."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatrain_ray.engine.layout.expert_names import whole_name
from megatrain_ray.engine.model.structure import LayerKind, LayerSpec, ModelStructure

# Path of one expert in a list of experts: that of the list, then the expert's number.
_MEMBER = re.compile(r"(?P<list>.*\.experts)\.\d+(?=\.)")


class Product(NamedTuple):
    """Describes the products of one matrix with tokens."""

    # That one token is multiplied with; of experts, only those that it is routed to. In a layer of a vision tower, that
    # all rows are multiplied with which a token of an image takes.
    elements: float
    trained: bool
    of_mlp: bool = False  # whether it belongs to the part of a block that can be computed in chunks of tokens
    num_experts: int = 0  # 0: it is no product of experts
    active: int = 0  # experts that a token is routed to
    fp8_sides: int = 0  # rows and columns of the matrix together; 0: it is not multiplied in FP8

    @property
    def routed_share(self) -> float:
        """Return the share of all tokens that an expert gets if all get as many."""
        return self.active / self.num_experts


class BlockAttention(NamedTuple):
    """Describes the attention of one layer."""

    width: float  # heads × head_dim
    window: int | None  # how many tokens back a token attends to; None: all of its document
    passes: int = 3  # 1 for a forward, and 2 more for a backward

    def flops(self, num_tokens: int, sum_squared_lengths: int) -> float:
        """Return the FLOPs of one pass. Causal attention counts half of all pairs of tokens.

        num_tokens: tokens of all documents.
        sum_squared_lengths: sum over all documents of their squared lengths in tokens.
        """
        most = 2 * self.window * num_tokens if self.window else math.inf
        return 2.0 * self.width * min(sum_squared_lengths, most)


@dataclass(frozen=True)
class LayerWork:
    """Describes what one layer computes."""

    products: tuple[Product, ...]
    attention: BlockAttention | None  # None if the layer does not attend
    has_backward: bool  # whether a gradient reaches the layer
    of_images: bool = False  # whether it runs only for tokens of images

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
    without_backward, attention = structure.without_backward, dict[int, BlockAttention]()
    every_window = windows or [None] * len(structure.blocks)
    of_layers = [(i, window) for block, window in zip(structure.blocks, every_window, strict=False) for i in block]
    for i, window in of_layers if structure.attention_widths else ():
        attention[i] = BlockAttention(structure.attention_widths[i - 1], window, 1 if i in without_backward else 3)
    stacks = _stacks(structure)
    return tuple(
        LayerWork(
            tuple(_products(layer, structure, stacks, active_experts)), attention.get(i), i not in without_backward,
            of_images=layer.rows_per_token is not None,
        )
        for i, layer in enumerate(structure.layers)
    )  # fmt: skip


def _stacks(structure: ModelStructure) -> Mapping[str, int]:
    """Return the number of experts in each stack of experts, by the name of the whole stack, over all layers."""
    found: Counter[str] = Counter()
    for p in (p for layer in structure.layers for p in layer.parameters if len(p.shape) == 3):
        # A stack of matrices with one row each is the weight of a depthwise convolution.
        found[whole_name(p.name)] += p.shape[0] if p.shape[1] > 1 else 1
    return found


def _products(
    layer: LayerSpec, structure: ModelStructure, stacks: Mapping[str, int], active: int | None
) -> Iterator[Product]:
    members = {match[0] for p in layer.parameters if (match := _MEMBER.search(p.name))}
    in_list = Counter(name.rpartition(".")[0] for name in members)  # number of experts by the path of their list
    for p in layer.parameters:
        is_table = layer.kind is LayerKind.EMBEDDING or layer.rows_per_token is not None
        looked_up = is_table and (p.tied_to or p.name) in structure.looked_up
        if looked_up or len(p.shape) < 2 or p.name.endswith("bias"):
            continue
        match = _MEMBER.search(p.name)
        num_experts = in_list[match["list"]] if match else stacks.get(whole_name(p.name), 1)
        routed = min(active or num_experts, num_experts)
        elements = math.prod(p.shape) * routed / num_experts * (layer.rows_per_token or 1)
        of_mlp = layer.mlp is not None and p.local.startswith(f"{layer.mlp.path}.")
        experts = (num_experts, routed) if num_experts > 1 else (0, 0)
        yield Product(elements, p.group.trained, of_mlp, *experts, sum(p.shape) if p.name in structure.fp8 else 0)
