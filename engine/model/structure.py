"""Describes a model for the engine: its layers in the order of a forward, and what each consists of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode

from megatrain_ray.engine.layout.expert_names import whole_name
from megatrain_ray.engine.layout.flat_layout import FlatLayout, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.model.images import TOWER

ModelFactory = Callable[[torch.dtype], nn.Module]
LARGE_ELEMENTS = 64 << 20  # 256 MiB in FP32
DRAWS = frozenset({"normal_", "uniform_", "kaiming_uniform_"})


class LayerKind(Enum):
    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


class Mlp(NamedTuple):
    """Describes the MLP of a block: a module that computes each token independently of the others."""

    path: str  # within the block
    width: int  # elements per token of its largest tensor


class Entered(NamedTuple):
    """Identifies an input tensor of a call of the module at `path`."""

    path: str
    position: int  # index among the arguments, with containers flattened


class Returned(NamedTuple):
    """Identifies an output tensor of a call of the module at `path`."""

    path: str
    number: int  # index among the floating-point tensors that the call returned


class Part(NamedTuple):
    """Describes a layer that is one part of a block (discovery/block_parts.py)."""

    block: str  # path of the block
    is_last: bool
    later: int  # what the block saves after this part is read by the backward of the part this many further on
    leaving: tuple[Entered, ...]  # inputs of calls in the block that the block's forward does not read after this part
    spent: tuple[Returned, ...]  # outputs of calls in the block that nothing reads after this part, not even a backward


@dataclass(frozen=True)
class LayerSpec:
    """Describes a layer of the schedule."""

    name: str
    kind: LayerKind
    modules: tuple[str, ...]  # paths of the modules that it consists of
    parameters: tuple[ParameterSpec, ...]  # their parameters in model order
    mlp: Mlp | None = None  # the module of a block that can be computed for some tokens at a time, if there is one
    part: Part | None = None  # for a layer that is one part of a block
    # For a layer of the vision tower or of the projector, which runs for images only: rows of its output per token that
    # is one of an image. None for other layers.
    rows_per_token: float | None = None


@dataclass(frozen=True)
class ModelStructure:
    """Describes the layers in the order of a forward: embedding, blocks, head.

    Parameters that a text never reaches, for instance those of a vision tower, never change. They belong to no layer,
    except for those in a module of a layer, which are frozen.
    """

    layers: tuple[LayerSpec, ...]
    parameter_order: tuple[str, ...]  # names of the trained parameters in model order
    base: str  # path of the module that holds the layers and returns the final hidden state
    loss_modules: frozenset[str]  # modules of the head that are called on one chunk of tokens of the hidden state each
    vocab_size: int
    # For each layer between embedding and head: heads × head_dim; 0: it does not attend to every token of the text.
    attention_widths: tuple[float, ...] = ()
    looked_up: frozenset[str] = frozenset()  # parameters whose rows are picked by index: embeddings
    fp8: frozenset[str] = frozenset()  # parameters that are multiplied in FP8
    norms: frozenset[str] = frozenset()  # modules of the head that compute each token independently of the others
    learned_masks: frozenset[str] = frozenset()  # modules of layers whose attention has a mask with a gradient
    unreached: tuple[str, ...] = ()  # modules and parameters that stay as they are, since no gradient reaches them
    is_reward: bool = False  # the head gives each token one score, not a logit for each word
    aliased_size: int | None = None  # as ModelLayout.aliased_size

    def layout(self, num_fragments: int = 1) -> ModelLayout:
        """Return the layout of all layers. Blocks are cut into fragments; embedding and head stay whole."""
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
        """Return the layers of each block of the language model: one, or one for each of its parts."""
        found: dict[object, list[int]] = {}
        for i, layer in enumerate(self.layers):
            if layer.kind is LayerKind.BLOCK and layer.rows_per_token is None:
                found.setdefault(layer.part.block if layer.part else i, []).append(i)
        return tuple(map(tuple, found.values()))

    @property
    def num_logits(self) -> int:
        """Return how many numbers the head gives each token."""
        return 1 if self.is_reward else self.vocab_size

    @cached_property
    def fp8_shapes(self) -> frozenset[tuple[int, ...]]:
        """Return the shapes of the matrices that are multiplied in FP8."""
        return frozenset(p.shape for layer in self.layers for p in layer.parameters if p.name in self.fp8)

    @property
    def undivided_names(self) -> tuple[str, ...]:
        """Return a name for each layer: that of its block (`layers.` and the block's number), else the layer's own."""
        return tuple(".".join(layer.name.split(".")[:2]) for layer in self.layers)

    @property
    def has_tower(self) -> bool:
        """Return whether layers of a vision tower run in a step, between the embedding and the first block."""
        return any(layer.rows_per_token is not None for layer in self.layers)

    @property
    def is_divided(self) -> bool:
        """Return whether blocks are divided into parts, each a layer of its own."""
        return any(layer.part for layer in self.layers)

    @cached_property
    def expert_groups(self) -> int:
        """Return the largest number of ranges into which the experts of a block are divided; 1: none are divided."""
        ranges = Counter(whole_name(p.name) for layer in self.layers for p in layer.parameters)
        return max(ranges.values(), default=1)

    @property
    def has_frozen(self) -> bool:
        """Return whether some parameter of a layer is not trained."""
        return any(not p.group.trained for layer in self.layers for p in layer.parameters)

    @property
    def loss_parameters(self) -> frozenset[str]:
        """Return the names of the trained parameters that the head owns and that the modules of the loss read."""
        own = (p.name for p in self.layers[-1].parameters if p.group.trained and p.tied_to is None)
        return frozenset(name for name in own if any(name.startswith(f"{path}.") for path in self.loss_modules))

    @property
    def lowest_trained(self) -> int:
        return self.layout().lowest_trained

    @cached_property
    def without_backward(self) -> frozenset[int]:
        """Return the layers that no gradient reaches: those below the lowest trained layer, and a frozen vision tower.

        A tower begins at pixels, which have no gradient. Its own blocks take nothing from projectors, which may stand
        between them.
        """
        found, tower_is_trained, vision_is_trained = set(range(self.lowest_trained)), False, False
        for i, layer in enumerate(self.layers):
            if layer.rows_per_token is None:
                continue
            of_tower = [p.group.trained for p in layer.parameters if re.search(TOWER, p.name)]
            is_trained = any(p.group.trained for p in layer.parameters)
            tower_is_trained |= any(of_tower)
            vision_is_trained |= is_trained
            if not (is_trained or (tower_is_trained if of_tower else vision_is_trained)):
                found.add(i)
        return frozenset(found)

    @cached_property
    def layer_of(self) -> Mapping[str, int]:
        """Return the layer of each module, by path."""
        return {path: i for i, layer in enumerate(self.layers) for path in layer.modules}


def kept_in_fp32(model: nn.Module, name: str) -> bool:
    """Return whether a Transformers model names this parameter or buffer among those that stay FP32 in a bf16 model."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if hasattr(model, "_get_dtype_plan"):  # Transformers 5, where a name need not begin or end with a pattern
        return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)
    return any(re.search(rf"(^|\.){pattern}($|\.)", name) for pattern in patterns)


class _WithoutValues(TorchFunctionMode):
    """Makes large uninitialised tensors on the meta device: parameters, which would go there a moment later.

    Random values are not drawn for tensors on the meta device. torch traces such a draw in Python, which took most of
    the time of building a model.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty and options.get("device") is None:
            made = torch.empty(*args, **{**options, "device": "meta"})
            if made.numel() > LARGE_ELEMENTS:
                return made
        if getattr(func, "__name__", None) in DRAWS:  # of torch.nn.init, which name their tensor, and of tensors
            drawn = options["tensor"] if "tensor" in options else args[0]
            if drawn.is_meta:
                return drawn
        return func(*args, **options)


def build_empty(factory: ModelFactory, dtype: torch.dtype) -> nn.Module:
    """Return the model with its parameters on the meta device and its buffers (rotary frequencies) computed.

    A parameter takes no more than 256 MiB meanwhile: a layer's experts in DeepSeek-V3 would take 45 GB.
    """
    with init_empty_weights(include_buffers=False), _WithoutValues():
        model = factory(dtype)
    if tie := getattr(model, "tie_weights", None):
        tie()  # again: what was tied within the block became several parameters
    model.train()
    return model
