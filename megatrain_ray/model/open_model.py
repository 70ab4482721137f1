"""Opens the model that a configuration names: reads and checks its settings, and finds its files."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.foreign_folders import advice_on, names_in
from megatrain_ray.io.checkpoints.hub import find_on_hub
from megatrain_ray.io.checkpoints.peft_adapter import CONFIG_NAME as ADAPTER_NAME
from megatrain_ray.io.checkpoints.quantisation import refusal, without_quantisation
from megatrain_ray.io.checkpoints.safetensors_folder import INDEX_NAME, weight_files
from megatrain_ray.model.architecture import base_prefix, checkpoint_names, is_known
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.model.sight_check import sees_later_tokens
from megatrain_ray.read_file import parse_json, regular_file

log = logging.getLogger(__name__)

GENERATION_NAME = "generation_config.json"


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
    if not is_here or not source.differs_from_tied():
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

    It is probably a typo, which Transformers would ignore. Types that refuse their own defaults are not checked.
    """
    from transformers import AutoConfig

    try:
        default = AutoConfig.for_model(config["model_type"])
    except Exception:  # of any kind: each type has checks of its own
        return
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
