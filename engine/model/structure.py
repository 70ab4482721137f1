"""What the engine knows of a model: its layers in the order of a forward, and what each is made of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch
from accelerate import init_empty_weights
from torch import nn

from megatrain_ray.engine.layout.expert_names import whole_name
from megatrain_ray.engine.layout.flat_layout import FlatLayout, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout

ModelFactory = Callable[[torch.dtype], nn.Module]


class LayerKind(Enum):
    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


class Mlp(NamedTuple):
    """A part of a block in which no token looks at another. `path`: from the block. `width`: elements that its largest
    tensor has for each token."""

    path: str
    width: int


class Entered(NamedTuple):
    """A tensor that entered the call of a module: its place among the arguments, containers flattened."""

    path: str
    position: int


class Returned(NamedTuple):
    """A tensor that the call of a module returned: its place among the floating-point ones."""

    path: str
    number: int


class Part(NamedTuple):
    """What makes a layer one part of a block (discovery/block_parts.py). `block`: its path. `leaving`: what entered
    calls of the block, and nothing of its forward reads behind this part. `spent`: what calls of the block returned,
    and nothing at all reads behind this part. `later`: what the block saves behind this part is read by a backward that
    begins so many parts later."""

    block: str
    is_last: bool
    later: int
    leaving: tuple[Entered, ...]
    spent: tuple[Returned, ...]


@dataclass(frozen=True)
class LayerSpec:
    """A layer of the schedule: the modules it is made of, by path, and their parameters in model order. `mlp`: what of
    a block can be computed for some tokens at a time. `part`: where it is not a whole block."""

    name: str
    kind: LayerKind
    modules: tuple[str, ...]
    parameters: tuple[ParameterSpec, ...]
    mlp: Mlp | None = None
    part: Part | None = None


@dataclass(frozen=True)
class ModelStructure:
    """Layers in the order of a forward: embedding, blocks, head. Parameters that a text never reaches, a vision tower's
    for instance, belong to none: they stay as they are."""

    layers: tuple[LayerSpec, ...]
    parameter_order: tuple[str, ...]  # of those that are trained
    base: str  # path of the module that holds the layers and returns the final hidden state
    loss_modules: frozenset[str]  # of the head: called on the final hidden state, token chunk by token chunk
    vocab_size: int
    # Of each layer that is a block, or a part of one: heads × head_dim; 0: it does not attend to every token.
    attention_widths: tuple[float, ...] = ()
    looked_up: frozenset[str] = frozenset()  # parameters whose rows are picked by index: embeddings
    norms: frozenset[str] = frozenset()  # of the head: modules in which no token looks at another
    aliased_size: int | None = None  # of layouts

    def layout(self, num_fragments: int = 1) -> ModelLayout:
        """Blocks are cut into fragments; embedding and head stay whole."""
        return ModelLayout(
            tuple(
                FlatLayout.build(s.name, s.parameters, num_fragments if s.kind is LayerKind.BLOCK else 1)
                for s in self.layers
            ),
            self.parameter_order,
            self.aliased_size,
        )

    @cached_property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each block: one, or its parts."""
        found: dict[object, list[int]] = {}
        for i, layer in enumerate(self.layers):
            if layer.kind is LayerKind.BLOCK:
                found.setdefault(layer.part.block if layer.part else i, []).append(i)
        return tuple(map(tuple, found.values()))

    @property
    def undivided_names(self) -> tuple[str, ...]:
        """Of each layer what it is called, or its block where it is a part of one."""
        names = [layer.name for layer in self.layers]
        for number, block in enumerate(self.blocks):
            for i in block:
                names[i] = f"layers.{number}"
        return tuple(names)

    @property
    def is_divided(self) -> bool:
        """Whether a block is more than one layer."""
        return any(layer.part for layer in self.layers)

    @cached_property
    def expert_groups(self) -> int:
        """Ranges that the experts of a block are in, at most; 1: none has them apart."""
        ranges = Counter(whole_name(p.name) for layer in self.layers for p in layer.parameters)
        return max(ranges.values(), default=1)

    @property
    def has_frozen(self) -> bool:
        """Whether a parameter of a layer is not trained."""
        return any(not p.group.trained for layer in self.layers for p in layer.parameters)

    @property
    def loss_parameters(self) -> frozenset[str]:
        """The head's own trained ones that the loss itself reads."""
        own = (p.name for p in self.layers[-1].parameters if p.group.trained and p.tied_to is None)
        return frozenset(name for name in own if any(name.startswith(f"{path}.") for path in self.loss_modules))

    @property
    def lowest_trained(self) -> int:
        return self.layout().lowest_trained

    def layer_of(self, path: str) -> int:
        return self._layers_by_module[path]

    @cached_property
    def _layers_by_module(self) -> Mapping[str, int]:
        return {path: i for i, layer in enumerate(self.layers) for path in layer.modules}


def kept_in_fp32(model: nn.Module, name: str) -> bool:
    """Whether a transformers model wants this parameter or buffer in FP32 when the others are BF16."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){re.escape(pattern)}($|\.)", name) for pattern in patterns)


def build_empty(factory: ModelFactory, dtype: torch.dtype) -> nn.Module:
    """The model with parameters on the meta device and buffers (rotary frequencies) computed."""
    with init_empty_weights(include_buffers=False):
        model = factory(dtype)
    model.train()
    return model
