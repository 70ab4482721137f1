"""Describes where a model comes from: a Hugging Face folder (local or hub), or a configuration with random weights.

Picklable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatrain_ray.config.train_groups import LoraConfig
from megatrain_ray.engine.layout.expert_names import joined_shape, whole_name
from megatrain_ray.engine.layout.flat_layout import ParameterSpec
from megatrain_ray.engine.model.expert_groups import GroupedFactory
from megatrain_ray.engine.model.fp8_products import Fp8Factory
from megatrain_ray.engine.model.lora import AdaptedFactory, Lora, is_adapter
from megatrain_ray.engine.model.structure import ModelFactory, ModelStructure, build_empty
from megatrain_ray.engine.weights.initial_values import Fill, fills_of, fills_up_to
from megatrain_ray.engine.weights.lora_values import LoraWeights
from megatrain_ray.engine.weights.weight_source import RandomSource, WeightSource, WithNew
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.hub import HubFolder, find_on_hub
from megatrain_ray.io.checkpoints.leftovers import PATTERNS, Leftovers, find_leftovers
from megatrain_ray.io.checkpoints.peft_adapter import CONFIG_NAME as ADAPTER_NAME
from megatrain_ray.io.checkpoints.peft_adapter import WEIGHTS_NAME, AdapterFolder
from megatrain_ray.io.checkpoints.safetensors_folder import WeightFolder, equal_values, fetch_weights, weight_files
from megatrain_ray.io.checkpoints.weight_map import MappedWeights, WeightMap
from megatrain_ray.model.architecture import REWARD_HEAD, Architecture, known_names
from megatrain_ray.model.positions import positions_of


@dataclass(frozen=True)
class ModelSource:
    """Describes a model's configuration, weights, code and LoRA pairs.

    config: the model's Hugging Face configuration as plain data.
    folder: folder of its weights; None: random weights.
    seed: of random weights and new pairs.
    code: folder of the model's own modeling code, if that is needed and may run.
    generation_config: the folder's, which saves and exports keep.
    hub: the repository of `folder`, if it is from the hub; the weights are fetched when they are first needed.
    lora: the LoRA pairs of its matrices; None: none.
    adapter: folder or hub id from which the pairs are read; None: new pairs.
    names: names of the weights in `folder`. They are found only once, so that a shard that reads weights need not
        import Transformers, which takes 3 s.
    tied: parameters that the configuration ties to another one, each with that one. It is found with `names`.
    prefix: name of the base model within the model, which names in `folder` may lack. It is found with `names`.
    fills: what the base's random weights are filled with, if all are plain. They are found only once, as `names` are.
    expert_groups: number of modules into which the experts of a block are divided, at most.
    fp8: matrices of its layers are multiplied in FP8 (engine/model/fp8_products.py).
    has_new_head: `folder` lacks the head of the reward model, which begins with random weights.
    is_typed: the configuration was written by the user, so an unknown setting may be a typo. Makers' configurations
        have settings that only other programs read.
    """

    config: Mapping[str, Any]
    folder: Path | None
    seed: int
    code: Path | None = None
    generation_config: Mapping[str, Any] | None = None
    hub: HubFolder | None = None
    lora: Lora | None = None
    adapter: str | None = None
    names: WeightMap = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    fills: Mapping[str, Sequence[Fill]] = field(default_factory=dict)
    expert_groups: int = 1
    fp8: bool = False
    has_new_head: bool = False
    is_typed: bool = False

    @property
    def factory(self) -> ModelFactory:
        """Return a function that builds the model with a given parameter type, for meta or fake tensors."""
        base = Fp8Factory(self.base_factory) if self.fp8 else self.base_factory
        whole = AdaptedFactory(base, self.lora) if self.lora else base
        return GroupedFactory(whole, self.expert_groups) if self.expert_groups > 1 else whole

    @property
    def architecture(self) -> Architecture:
        """Return the model's class and configuration, without its weights."""
        return Architecture(dict(self.config), self.code)

    @property
    def base_factory(self) -> ModelFactory:
        """Return `factory` without LoRA pairs, divided experts and FP8. Persistent buffers have their values."""
        return replace(self.architecture, weights=self.folder)

    def setting(self, name: str) -> Any:
        """Return a setting of the language model by its common name in Transformers; None if it has no such setting.

        It is found even if the model's family has another name for it.
        """
        return getattr(self.architecture.config.get_text_config(), name, None)

    @property
    def num_positions(self) -> int | None:
        """Return how many positions the language model has; None if it has no limit."""
        return positions_of(self.architecture.config)

    @property
    def written_vocab_size(self) -> int | None:
        """Return vocab_size if the configuration itself holds it under this name, else None.

        This needs no import of Transformers.
        """
        texts = self.config.get("text_config") or self.config
        written = texts.get("vocab_size") if isinstance(texts, Mapping) else None
        return written if isinstance(written, int) else None

    def check_weights(self, structure: ModelStructure) -> None:
        """Raise ConfigError if the folder lacks a parameter of the model or holds it in another shape.

        Also raises ConfigError if the weights cannot be fetched.
        """
        if self.folder is not None:
            shapes = _whole_shapes(p for layer in structure.layers for p in layer.parameters)
            new = [name for name in shapes if is_adapter(name) or (self.has_new_head and name == REWARD_HEAD)]
            self._mapped(self.folder).check({name: shape for name, shape in shapes.items() if name not in new})
            if differs := self.differs_from_tied():
                raise ConfigError(
                    f"model.path: {self.folder} holds a {differs} of its own, which the configuration ties to "
                    f"{self.tied[differs]}; it has been fetched now: start again, and both are trained"
                )

    def differs_from_tied(self) -> str | None:
        """Return a tied parameter of which the folder holds other values than of the one that it is tied to.

        Transformers then trusts the values and ties nothing. None: there is no such parameter. Raises ConfigError if
        the weights are not here.
        """
        if self.folder is None or not self.tied:
            return None
        weights, model = self._mapped(self.folder), build_empty(self.base_factory, torch.float32)
        for name, other in self.tied.items():
            size = model.get_parameter(other).numel()
            if weights.holds(name) and weights.holds(other) and not equal_values(weights.read, name, other, size):
                return name
        return None

    def check_adapter(self, structure: ModelStructure) -> None:
        """Raise ConfigError if the adapter to continue from does not fit this structure."""
        if adapter := self._stored_adapter():
            trained = [p for layer in structure.layers for p in layer.parameters if p.group.trained]
            shapes = _whole_shapes(trained)
            tied = {p.name: p.tied_to for p in trained if p.tied_to is not None}
            adapter.check(shapes, list(filter(is_adapter, shapes)), tied)

    def weights(self) -> WeightSource:
        """Return a source of the initial FP32 values of every parameter."""
        base = self.base_weights()
        if self.lora is None:
            return base
        return LoraWeights(base, build_empty(self.factory, torch.float32), self.seed, self._stored_adapter())

    def base_weights(self) -> WeightSource:
        """Return a source of the initial FP32 values of the base, without LoRA pairs and values of an adapter.

        It holds the values of everything that is frozen.
        """
        if self.folder is not None and not self.has_new_head:
            return self._mapped(self.folder)
        # The model is made in this thread: several threads read the values.
        drawn = RandomSource(self.fills or build_empty(self.base_factory, torch.float32), self.seed)
        return WithNew(self._mapped(self.folder), REWARD_HEAD, drawn) if self.folder else drawn

    def with_fills(self) -> ModelSource:
        """Return the source with `fills`, if its weights or its head are random."""
        if self.has_new_head and self.folder is not None:
            fills = fills_up_to(build_empty(self.base_factory, torch.float32), REWARD_HEAD)
            return replace(self, fills={REWARD_HEAD: fills} if fills else {})
        if self.folder is not None:
            return self
        return replace(self, fills=fills_of(build_empty(self.base_factory, torch.float32)))

    def leftovers(self) -> Leftovers:
        """Return what the folder holds beyond the model, after fetching its other files. Raises ConfigError."""
        if self.folder is None or self.architecture.is_reward:  # as in source_rest
            return Leftovers()
        if self.hub is not None:
            self.hub.add_matching(PATTERNS)
        known = known_names(build_empty(self.base_factory, torch.float32), self.names)
        return find_leftovers(self._mapped(self.folder).folder, known)

    def weight_paths(self) -> tuple[Path, ...]:
        """Return the files of the weights, after fetching them; none if they are random. Raises ConfigError."""
        if self.folder is None:
            return ()
        folder = self._mapped(self.folder).folder.path
        return tuple(folder / name for name in weight_files(folder))

    def _stored_adapter(self) -> AdapterFolder | None:
        """Open the adapter to continue from; None if there is none.

        Raises ConfigError if it cannot be read or has pairs of another rank or alpha.
        """
        if self.lora is None or self.adapter is None:
            return None
        stored = _open_adapter(self.adapter)
        if (stored.rank, stored.alpha) != (self.lora.rank, self.lora.alpha):
            raise ConfigError(
                f"lora.path: {stored.path} has rank {stored.rank} and alpha {stored.alpha:g}, the settings say "
                f"{self.lora.rank} and {self.lora.alpha:g}; set lora.rank and lora.alpha to the former"
            )
        return stored

    def _mapped(self, folder: Path) -> MappedWeights:
        if self.hub is not None:
            fetch_weights(self.hub)
        return MappedWeights(WeightFolder.open(folder, self.prefix), self.names)

    def as_reward_model(self) -> ModelSource:
        """Return the source of a reward model with this body. Raises ConfigError if Transformers has no such model."""
        whole = self.architecture
        return replace(self, config=whole.as_reward_model().settings, has_new_head=not whole.is_reward)

    def with_lora(self, lora: LoraConfig | None) -> ModelSource:
        """Return this source with LoRA pairs; unchanged if `lora` is None."""
        if lora is None:
            return self
        return replace(self, lora=Lora(lora.match, lora.rank, lora.alpha, lora.dropout), adapter=lora.path)


def _whole_shapes(parameters: Iterable[ParameterSpec]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters as a folder holds them: ranges of experts joined, tied parameters left out."""
    found: dict[str, tuple[int, ...]] = {}
    for p in parameters:
        name = whole_name(p.name)
        if p.tied_to is None:
            found[name] = joined_shape(found.get(name), p.shape)
    return found


def _open_adapter(name: str) -> AdapterFolder:
    hub = find_on_hub(name, "lora.path", ADAPTER_NAME, ())
    if hub is not None:
        hub.require([WEIGHTS_NAME])
    folder = hub.path if hub else Path(name).absolute()
    if not folder.is_dir():
        raise ConfigError(f"lora.path: {name} is no folder, nor can it be a hub id; expected an adapter of peft's")
    return AdapterFolder.open(folder)
