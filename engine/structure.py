"""The trial forward: finds a model's structure and what its layers keep for backward, on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from megatrain_ray.engine.layout import ParameterSpec
from megatrain_ray.engine.model import (
    LayerKind,
    LayerSpec,
    ModelFactory,
    ModelStructure,
    find_blocks,
    find_outer_modules,
)
from megatrain_ray.errors import ConfigError


@dataclass(frozen=True)
class ActivationBytes:
    """What one micro-batch leaves on the device, per layer: the tensors that enter it, and what a kept graph saves
    beyond them and the weights."""

    boundary: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass
class _Trial:
    """What the hooks of a trial forward see."""

    order: list[str] = field(default_factory=list)
    boundary: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    saved: list[torch.Tensor] = field(default_factory=list)
    base_returned: int = -1

    def enter(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.order.append(path)
        self.saved.clear()
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.boundary[path] = _unique_bytes([t for t in inputs if t.requires_grad], set())
        self._inputs = {t.untyped_storage()._cdata for t in inputs}

    def leave(self, path: str, weights: set[int]) -> None:
        self.kept[path] = _unique_bytes(self.saved, weights | self._inputs)
        self.saved.clear()


def _unique_bytes(tensors: Sequence[torch.Tensor], without: set[int]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(num_bytes for key, num_bytes in storages.items() if key not in without)


def discover(
    factory: ModelFactory, dtype: torch.dtype, micro_batch_size: int, seq_len: int
) -> tuple[ModelStructure, ActivationBytes]:
    """Runs one forward of [micro_batch_size, seq_len] ids on fake tensors.

    Raises ConfigError, naming it, for a model whose layers are not called once each in their order.
    """
    with FakeTensorMode():
        model = factory(dtype)
        model.train()
        blocks = find_blocks(model)
        paths = [f"{blocks}.{name}" for name, _ in model.get_submodule(blocks).named_children()]
        outer = find_outer_modules(model, blocks)
        trial = _run(model, [*paths, *outer], torch.zeros(micro_batch_size, seq_len, dtype=torch.int64))
    layers = _layers(model, paths, trial)
    order = tuple(name for name, _ in model.named_parameters())
    head_calls = trial.order[trial.base_returned :]
    structure = ModelStructure(layers, order, frozenset(head_calls), _vocab_size(model))
    kept = tuple(sum(trial.kept[p] for p in layer.modules if p not in head_calls) for layer in layers)
    return structure, ActivationBytes(tuple(trial.boundary[layer.modules[0]] for layer in layers), kept)


def _run(model: nn.Module, paths: Sequence[str], input_ids: torch.Tensor) -> _Trial:
    trial = _Trial()
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    for path in paths:
        module = model.get_submodule(path)
        module.register_forward_pre_hook(
            lambda _, args, kwargs, path=path: trial.enter(path, args, kwargs), with_kwargs=True
        )
        module.register_forward_hook(lambda *_, path=path: trial.leave(path, weights))
    base = model.get_submodule(str(model.base_model_prefix))

    def base_returned(*_: Any) -> None:
        trial.base_returned = len(trial.order)

    base.register_forward_hook(base_returned)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        trial.saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=input_ids, use_cache=False)
    return trial


def _layers(model: nn.Module, blocks: Sequence[str], trial: _Trial) -> tuple[LayerSpec, ...]:
    called = [path for path in trial.order if path in set(blocks)]
    if called != list(blocks):
        raise ConfigError(
            f"{type(model).__name__} calls its layers as {called[:4]}…, expected each once in order "
            f"({blocks[0]} … {blocks[-1]}): shared or skipped layers are not supported yet"
        )
    first, last = trial.order.index(blocks[0]), trial.order.index(blocks[-1])
    between = [p for p in trial.order[first : last + 1] if p not in set(blocks)]
    if between or len(trial.order) != len(set(trial.order)):
        raise ConfigError(
            f"{type(model).__name__} calls {between or 'a module twice'} between its layers; not supported"
        )
    owners: dict[int, str] = {}
    return (
        _spec(model, "embedding", LayerKind.EMBEDDING, trial.order[:first], owners),
        *(_spec(model, f"layers.{i}", LayerKind.BLOCK, [path], owners) for i, path in enumerate(blocks)),
        _spec(model, "head", LayerKind.HEAD, trial.order[last + 1 :], owners),
    )


def _spec(model: nn.Module, name: str, kind: LayerKind, modules: Sequence[str], owners: dict[int, str]) -> LayerSpec:
    """`owners`: parameters seen so far, by identity; a second appearance is tied to the first."""
    parameters = []
    for path in modules:
        for local, parameter in model.get_submodule(path).named_parameters():
            full = f"{path}.{local}"
            tied_to = owners.setdefault(id(parameter), full)
            shape = tuple(parameter.shape)
            # Decoupled weight decay is for matrices: norms and biases have one dimension.
            decay = parameter.dim() > 1
            parameters.append(ParameterSpec(full, local, shape, decay, None if tied_to == full else tied_to))
    return LayerSpec(name, kind, tuple(modules), tuple(parameters))


def _vocab_size(model: nn.Module) -> int:
    size: int = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    return size
