"""A Hugging Face causal language model without weights: its structure, and a skeleton that runs with proxies.

Structure is found, not looked up by name: the layer list is the module list that holds most parameters; a trial
forward on fake tensors (no memory, no arithmetic) tells what is called before, after and how much each layer keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from megatrain_ray.engine.forward_pass import LayerProxy
from megatrain_ray.engine.layout import FlatLayout, ModelLayout, ParameterSpec
from megatrain_ray.errors import ConfigError

ModelFactory = Callable[[torch.dtype], nn.Module]


class LayerKind(Enum):
    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


@dataclass(frozen=True)
class LayerSpec:
    """A layer of the schedule: the modules it is made of, by path, and their parameters in model order."""

    name: str
    kind: LayerKind
    modules: tuple[str, ...]
    parameters: tuple[ParameterSpec, ...]


@dataclass(frozen=True)
class ModelStructure:
    """Layers in the order of a forward: embedding, blocks, head."""

    layers: tuple[LayerSpec, ...]
    parameter_order: tuple[str, ...]
    loss_modules: frozenset[str]  # of the head: called on the final hidden state, token chunk by token chunk
    vocab_size: int

    def layout(self, num_fragments: int = 1) -> ModelLayout:
        """Blocks are cut into fragments; embedding and head stay whole."""
        return ModelLayout(
            tuple(
                FlatLayout.build(s.name, s.parameters, num_fragments if s.kind is LayerKind.BLOCK else 1)
                for s in self.layers
            ),
            self.parameter_order,
        )

    def layer_of(self, path: str) -> int:
        return next(i for i, layer in enumerate(self.layers) if path in layer.modules)


def build_empty(factory: ModelFactory, dtype: torch.dtype) -> nn.Module:
    """The model with parameters on the meta device and buffers (rotary frequencies) computed."""
    with init_empty_weights(include_buffers=False):
        model = factory(dtype)
    model.train()
    return model


def find_blocks(model: nn.Module) -> str:
    """Path of the layer list. Raises ConfigError when the model has none."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    sizes: dict[str, int] = {path: sum(p.numel() for p in m.parameters()) for path, m in lists}
    if not sizes:
        raise ConfigError(f"{type(model).__name__} has no list of layers: only decoder-only models can be streamed")
    return max(sizes, key=lambda path: (sizes[path], -len(path)))


def find_outer_modules(model: nn.Module, blocks: str) -> tuple[str, ...]:
    """The largest modules with parameters that neither hold the layer list nor are in it."""
    found: list[str] = []

    def descend(module: nn.Module, path: str) -> None:
        own = [name for name, p in module._parameters.items() if p is not None]
        if own:
            raise ConfigError(
                f"{type(model).__name__}: parameter {path}{own[0]} belongs to no layer; not supported yet"
            )
        for name, child in module.named_children():
            child_path = f"{path}{name}"
            if child_path == blocks:
                continue
            if blocks.startswith(child_path + "."):
                descend(child, child_path + ".")
            elif any(True for _ in child.parameters()):
                found.append(child_path)

    descend(model, "")
    return tuple(found)


class Skeleton:
    """The model that runs a forward with proxies for its layers, and its head on chunks of hidden states."""

    def __init__(self, model: nn.Module, structure: ModelStructure, device: torch.device) -> None:
        self.modules = {p: model.get_submodule(p) for layer in structure.layers for p in layer.modules}
        prefix = str(model.base_model_prefix)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        for path, module in self.modules.items():
            if path not in structure.loss_modules:
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, LayerProxy(path, module))
        self._base = model.get_submodule(prefix)
        self._hidden = _Hidden()
        setattr(model, prefix, self._hidden)
        self._model = model

    def forward(self, input_ids: torch.Tensor) -> Any:
        """The base model's output for [B, T] ids; to be run by a ForwardPass."""
        return self._base(input_ids=input_ids, use_cache=False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, T, D] → [1, T, V] through the model's own head, whose parameters must be bound."""
        self._hidden.state = hidden
        try:
            output = self._model(inputs_embeds=hidden, use_cache=False)
        finally:
            self._hidden.state = None
        logits: torch.Tensor = output.logits
        return logits


class _Hidden(nn.Module):
    """Stands where the base model was and returns the hidden state it is given."""

    state: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast  # 2 s of imports that io/ users never need

        return BaseModelOutputWithPast(last_hidden_state=self.state)
