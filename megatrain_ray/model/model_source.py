"""Describes where a model comes from: a Hugging Face folder (local or hub), or a configuration with random weights.

Picklable.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.config.train_groups import LoraConfig
from megatrain_ray.engine.layout.expert_names import joined_shape, whole_name
from megatrain_ray.engine.layout.flat_layout import ParameterSpec
from megatrain_ray.engine.model.expert_groups import GroupedFactory
from megatrain_ray.engine.model.lora import AdaptedFactory, Lora, is_adapter
from megatrain_ray.engine.model.structure import ModelFactory, ModelStructure, build_empty
from megatrain_ray.engine.weights.initial_values import Fill, fills_of
from megatrain_ray.engine.weights.lora_values import LoraWeights
from megatrain_ray.engine.weights.weight_source import RandomSource, WeightSource
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.foreign_folders import advice_on, names_in
from megatrain_ray.io.checkpoints.hub import HubFolder, find_on_hub
from megatrain_ray.io.checkpoints.leftovers import PATTERNS, Leftovers, find_leftovers
from megatrain_ray.io.checkpoints.peft_adapter import CONFIG_NAME as ADAPTER_NAME
from megatrain_ray.io.checkpoints.peft_adapter import WEIGHTS_NAME, AdapterFolder
from megatrain_ray.io.checkpoints.quantisation import refusal, without_quantisation
from megatrain_ray.io.checkpoints.safetensors_folder import (
    INDEX_NAME,
    MappedWeights,
    WeightFolder,
    WeightMap,
    equal_values,
    weight_files,
)
from megatrain_ray.model.architecture import Architecture, base_prefix, checkpoint_names, is_known, known_names
from megatrain_ray.model.positions import positions_of
from megatrain_ray.model.sight_check import sees_later_tokens
from megatrain_ray.read_file import parse_json, regular_file

log = logging.getLogger(__name__)

GENERATION_NAME = "generation_config.json"


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
    is_typed: bool = False

    @property
    def factory(self) -> ModelFactory:
        """Return a function that builds the model with a given parameter type, for meta or fake tensors."""
        whole = AdaptedFactory(self._base, self.lora) if self.lora else self._base
        return GroupedFactory(whole, self.expert_groups) if self.expert_groups > 1 else whole

    @property
    def architecture(self) -> Architecture:
        """Return the model's class and configuration, without its weights."""
        return Architecture(dict(self.config), self.code)

    @property
    def _base(self) -> ModelFactory:
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
            self._mapped(self.folder).check({name: shape for name, shape in shapes.items() if not is_adapter(name)})
            if differs := self._differs_from_tied():
                raise ConfigError(
                    f"model.path: {self.folder} holds a {differs} of its own, which the configuration ties to "
                    f"{self.tied[differs]}; it has been fetched now: start again, and both are trained"
                )

    def _differs_from_tied(self) -> str | None:
        """Return a tied parameter of which the folder holds other values than of the one that it is tied to.

        Transformers then trusts the values and ties nothing. None: there is no such parameter. Raises ConfigError if
        the weights are not here.
        """
        if self.folder is None or not self.tied:
            return None
        weights, model = self._mapped(self.folder), build_empty(self._base, torch.float32)
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
        if self.folder is not None:
            return self._mapped(self.folder)
        make = partial(build_empty, self._base, torch.float32)
        if self.fills:
            return RandomSource(make, self.seed, self.fills)
        model = make()  # now, in this thread: weights are read by several
        return RandomSource(lambda: model, self.seed)

    def with_fills(self) -> ModelSource:
        """Return the source with `fills`, if its weights are random."""
        if self.folder is not None:
            return self
        return replace(self, fills=fills_of(build_empty(self._base, torch.float32)))

    def leftovers(self) -> Leftovers:
        """Return what the folder holds beyond the model, after fetching its other files. Raises ConfigError."""
        if self.folder is None:
            return Leftovers()
        if self.hub is not None:
            self.hub.add_matching(PATTERNS)
        known = known_names(build_empty(self._base, torch.float32), self.names)
        return find_leftovers(self._mapped(self.folder).folder, known)

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
            self.hub.require(weight_files(folder))
        return MappedWeights(WeightFolder.open(folder, self.prefix), self.names)

    def with_lora(self, lora: LoraConfig | None) -> ModelSource:
        """Return this source with LoRA pairs; unchanged if `lora` is None."""
        if lora is None:
            return self
        return replace(self, lora=Lora(lora.match, lora.rank, lora.alpha, lora.dropout), adapter=lora.path)


def open_model(model: ModelConfig) -> ModelSource:
    """Read and check the model of a configuration. Raises ConfigError for anything that cannot work."""
    return checked(read_model(model))


def checked(source: ModelSource) -> ModelSource:
    """Check what `read_model` found and add the names of its weights. Raises ConfigError if it makes no model."""
    _check(source)
    if source.folder is None:
        return source
    folder, source = source.folder, _with_names(source)
    is_here = all((folder / file).exists() for file in weight_files(folder))  # a plan needs no weights
    if not is_here or not source._differs_from_tied():
        return source
    config = copy.deepcopy(dict(source.config))
    for settings in (config, config.get("text_config", {})):
        settings["tie_word_embeddings"] = False
    return _with_names(replace(source, config=config))


def _with_names(source: ModelSource) -> ModelSource:
    """Return the source with what the names in a folder of its weights are found by."""
    empty = build_empty(source.factory, torch.float32)
    tied = dict(getattr(empty, "all_tied_weights_keys", {}))
    return replace(source, names=checkpoint_names(empty), prefix=base_prefix(empty), tied=tied)


def read_model(model: ModelConfig) -> ModelSource:
    """Read the configuration of a model and locate its files.

    This imports nothing of Transformers, except for a model with code of its own. Raises ConfigError for what cannot be
    found or read.
    """
    folder, hub = None, None
    if model.path is not None:
        hub = find_on_hub(model.path, "model.path", "config.json", [GENERATION_NAME, INDEX_NAME])
        folder = hub.path if hub else Path(model.path).absolute()  # a process of Ray may have another directory
        if not folder.is_dir():
            raise ConfigError(f"model.path: {model.path} is no folder, nor can it be a hub id; expected one of these")
        place, config = folder, _read_config(folder / "config.json", "model.path")
        if (folder / ADAPTER_NAME).exists():
            raise ConfigError(
                f"model.path: {model.path} holds {ADAPTER_NAME} beside config.json, so Transformers loads the "
                "adapter's base: name that base, and this folder as lora.path; or move the adapter's files away"
            )
    elif isinstance(model.config, Mapping):
        place, config = None, dict(model.config)
    else:
        file = Path(str(model.config)).absolute()
        place, config = file if file.is_dir() else file.parent, _read_config(file, "model.config")
    code = _code(config, place, trusted=model.trust_remote_code)
    if hub and code:
        hub.add_code()
    generation_file = folder / GENERATION_NAME if folder else None
    generation = None
    if generation_file and generation_file.exists():
        generation = _read_generation(generation_file)
    if folder is not None and (refused := refusal(config, str(model.path))):
        raise ConfigError(f"model.path: {model.path}: {refused}")
    config = without_quantisation(config)  # weights are dequantised when they are read
    typed = isinstance(model.config, Mapping)
    return ModelSource(config, folder, model.seed, code, generation, hub, is_typed=typed)


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


def _code(config: Mapping[str, Any], place: Path | None, *, trusted: bool) -> Path | None:
    """Return the folder whose code makes the model; None for a model that Transformers has itself."""
    if "auto_map" not in config or is_known(config.get("model_type")):
        return None
    if place is None:
        raise ConfigError(
            "model.config: a model with code of its own (auto_map) needs its folder: give its config.json"
        )
    if not trusted:
        raise ConfigError(
            f"{place} is a {config.get('model_type')} model, which Transformers does not have: it comes with code of "
            "its own. Read that code, then set model.trust_remote_code: true to let it run"
        )
    return place


def _read_generation(file: Path) -> dict[str, Any] | None:
    """Return generation settings; None, as in Transformers, if the file is no JSON. Raises ConfigError."""
    try:
        parse_json(regular_file(file).read_text())
    except ValueError as error:
        log.warning("%s is not valid JSON, so it is passed over, as in Transformers: %s", file, error)
        return None
    except OSError:
        pass  # the next line says so
    return _read_config(file, "model.path")


def _read_config(path: Path, key: str) -> dict[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        config = parse_json(regular_file(path).read_text())
    except OSError as error:
        expected = advice_on(names_in(path.parent)) or "expected a Hugging Face config.json"
        if (path.parent / "saves").is_dir():
            expected = f"{path.parent} is a run directory: megatrain export makes a model's folder of it"
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}; {expected}") from None
    except ValueError as error:
        raise ConfigError(f"{key}: {path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{key}: {path} holds a {type(config).__name__}, expected a mapping of settings")
    return config


def _check_names(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown setting whose name is close to a known one.

    It is probably a typo, which Transformers would ignore.
    """
    from transformers import AutoConfig

    default = AutoConfig.for_model(config["model_type"])
    known = {*default.to_dict(), *default.attribute_map, "bos_token_id", "eos_token_id", "pad_token_id"}
    for name in config.keys() - known:
        close = get_close_matches(name, known, n=1, cutoff=0.85)
        if close and not name.startswith("_"):
            raise ConfigError(
                f"the model's configuration has no {name}; did you mean {close[0]}? If its maker wrote it so, give the "
                "file: model.config: FOLDER/config.json"
            )


def _check(source: ModelSource) -> None:
    kind = source.config.get("model_type")
    if source.code is None:
        if not is_known(kind):
            raise ConfigError(f"model_type: {kind!r} is none that this version of Transformers has")
        if source.is_typed:
            _check_names(source.config)
    architecture = source.architecture
    try:
        refusal = architecture.refusal()
        if refusal is None:
            with torch.device("meta"):
                architecture(torch.float32)
    except Exception as error:
        raise ConfigError(
            f"the model's configuration builds no {kind} model: {type(error).__name__}: {error}"
        ) from error
    if refusal is not None:
        raise ConfigError(f"a {kind} model cannot be trained: {refusal}")
    if sees_later_tokens(architecture):
        is_decoder = getattr(architecture.config, "is_decoder", True)
        hint = "" if is_decoder else " (is_decoder: true makes one of it, if its weights were trained so)"
        raise ConfigError(
            f"a {kind} model cannot be trained: its tokens see later ones, as a trial of a small copy shows; only "
            f"decoders are trained{hint}"
        )
