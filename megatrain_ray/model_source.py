"""Where a model comes from: a Hugging Face folder, or a configuration with random weights. Picklable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from megatrain_ray.config import ModelConfig
from megatrain_ray.engine.load import RandomSource, WeightSource
from megatrain_ray.engine.model import ModelFactory, ModelStructure, build_empty
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.weights import WeightFolder

SUPPORTED = ("llama",)  # what parity was shown for


@dataclass(frozen=True)
class ModelSource:
    """`config`: the model's Hugging Face configuration as plain data. `folder`: its weights; None: random."""

    config: Mapping[str, Any]
    folder: Path | None
    seed: int

    @property
    def factory(self) -> ModelFactory:
        """Builds the model with a given parameter type; for meta or fake tensors."""
        return _Factory(dict(self.config))

    @property
    def generation_config(self) -> dict[str, Any] | None:
        """The folder's generation_config.json, which an export carries on."""
        path = self.folder / "generation_config.json" if self.folder else None
        if path is None or not path.is_file():
            return None
        return _read_config(path, "model.path")

    @property
    def max_positions(self) -> int | None:
        return self.config.get("max_position_embeddings")

    def check_weights(self, structure: ModelStructure) -> None:
        """Raises ConfigError when the folder lacks a parameter of the model or holds it in another shape."""
        if self.folder is not None:
            owned = [p for layer in structure.layers for p in layer.parameters if p.tied_to is None]
            WeightFolder.open(self.folder).check({p.name: p.shape for p in owned})

    def weights(self) -> WeightSource:
        """Initial FP32 values of every parameter."""
        if self.folder is not None:
            return WeightFolder.open(self.folder)
        return RandomSource(build_empty(self.factory, torch.float32), self.seed)


@dataclass(frozen=True)
class _Factory:
    config: dict[str, Any]

    def __call__(self, dtype: torch.dtype) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM  # seconds of imports; errors come first

        values = {k: v for k, v in self.config.items() if k != "model_type"}
        config = AutoConfig.for_model(self.config["model_type"], **values)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def open_model(model: ModelConfig) -> ModelSource:
    """Reads and checks the configuration. Raises ConfigError for anything that cannot work."""
    if model.path is not None:
        folder = Path(model.path)
        if not folder.is_dir():
            raise ConfigError(
                f"model.path: {folder} is no folder; hub ids are downloaded by a later version: download it first "
                "and give the folder"
            )
        config = _read_config(folder / "config.json", "model.path")
        source = ModelSource(config, folder, model.seed)
    else:
        named = model.config
        config = dict(named) if isinstance(named, Mapping) else _read_config(Path(str(named)), "model.config")
        source = ModelSource(config, None, model.seed)
    _check(source)
    return source


def _read_config(path: Path, key: str) -> dict[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}; expected a Hugging Face config.json") from None
    except ValueError as error:
        raise ConfigError(f"{key}: {path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{key}: {path} holds a {type(config).__name__}, expected a mapping of settings")
    return config


def _check_names(config: Mapping[str, Any]) -> None:
    """A name that Transformers does not know and that is close to one it knows is a typo, which it would ignore."""
    from transformers import AutoConfig

    known = AutoConfig.for_model(config["model_type"]).to_dict()
    for name in config.keys() - known.keys():
        close = get_close_matches(name, known, n=1, cutoff=0.85)
        if close and not name.startswith("_"):
            raise ConfigError(f"the model's configuration has no {name}; did you mean {close[0]}?")


def _check(source: ModelSource) -> None:
    kind = source.config.get("model_type")
    if kind not in SUPPORTED:
        raise ConfigError(
            f"model_type: expected one of {', '.join(SUPPORTED)}, got {kind!r}; other models come with a later version"
        )
    _check_names(source.config)
    try:
        with torch.device("meta"):
            source.factory(torch.float32)
    except Exception as error:
        raise ConfigError(
            f"the model's configuration builds no {kind} model: {type(error).__name__}: {error}"
        ) from error
