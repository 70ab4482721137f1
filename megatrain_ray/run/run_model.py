"""Records which model a run is of when it begins, and compares it when the run goes on.

The run's own settings are compared elsewhere. They name a folder or file, and its content may have changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatrain_ray.config.yaml_file import leaves
from megatrain_ray.engine.layout.expert_names import joined_shape, whole_name
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.leftovers import Leftovers
from megatrain_ray.io.checkpoints.quantisation import without_quantisation
from megatrain_ray.io.files.atomic_file import write_atomically
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.read_file import parse_json, regular_file

MODEL_NAME = "model.json"
LEFTOVERS_KEY = "leftovers"
# Keys of a Hugging Face configuration that change nothing of what is computed here.
IRRELEVANT = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})


def record_model(path: Path, config: Mapping[str, Any], structure: ModelStructure, leftovers: Leftovers) -> None:
    """Write into run directory `path` that its run is of this model.

    leftovers: what the model's folder holds beyond the model.
    """
    described = _described(config, structure) | {LEFTOVERS_KEY: asdict(leftovers)}
    write_atomically(path / MODEL_NAME, json.dumps(described, indent=2) + "\n")


def read_leftovers(path: Path) -> Leftovers | None:
    """Return the leftovers that were recorded in directory `path`; None if they were not, as in early releases."""
    try:
        return Leftovers(**parse_json(regular_file(path / MODEL_NAME).read_bytes())[LEFTOVERS_KEY])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def model_type(path: Path) -> str | None:
    """Return the type of the model that the run in directory `path` is of; None if that cannot be read."""
    try:
        return str(parse_json(regular_file(path / MODEL_NAME).read_bytes())["config"]["model_type"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def check_saved(path: Path, manifest: Manifest) -> None:
    """Raise ConfigError if a save is of another model than the run in directory `path`, going by its model.json."""
    stored = _stored(path)
    if stored is None:
        return
    theirs = dict(leaves(stored["config"]))
    theirs |= {name: entry["shape"] for layer in stored["layers"].values() for name, entry in layer.items()}
    ours: dict[str, Any] = {}
    for p in (p for layer in manifest.layers for p in layer.parameters):
        ours[whole_name(p.name)] = joined_shape(ours.get(whole_name(p.name)), p.shape)
    relevant = {key: value for key, value in without_quantisation(manifest.model).items() if key not in IRRELEVANT}
    ours = json.loads(json.dumps(dict(leaves(relevant)) | ours))
    for key in dict.fromkeys([*theirs, *ours]):
        if not _equal(theirs.get(key), ours.get(key)):
            raise ConfigError(
                f"the save of step {manifest.step} is of another model than {path / MODEL_NAME} says: {key}: "
                f"{theirs.get(key)} -> {ours.get(key)}; take another save (--step), or move this one away"
            )


def check_model(path: Path, config: Mapping[str, Any], structure: ModelStructure) -> None:
    """Raise ConfigError naming the first difference if the run in directory `path` is of another model.

    Values of weights are not compared.
    """
    stored = _stored(path)
    if stored is None:
        return
    theirs = dict(leaves(stored))
    ours = dict(leaves(_described(config, structure)))
    differing = [key for key in dict.fromkeys([*theirs, *ours]) if not _equal(theirs.get(key), ours.get(key))]
    if differing:
        key = differing[0]
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise ConfigError(
            f"{path} holds a run of another model: {key}: {theirs.get(key)} -> {ours.get(key)}{more}; set the model "
            "back to what it was, or choose another run_dir"
        )


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values of a configuration are the same. NaN, which a config.json may hold, equals itself."""
    return one == other or json.dumps(one) == json.dumps(other)


def _stored(path: Path) -> dict[str, Any] | None:
    """Return the model that `record_model` wrote, without settings of quantisation; None if it was deleted."""
    file = path / MODEL_NAME
    try:
        stored = parse_json(regular_file(file).read_bytes())
        return {"config": without_quantisation(stored["config"]), "layers": stored["layers"]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); delete it to go on without comparing models") from None


def _described(config: Mapping[str, Any], structure: ModelStructure) -> dict[str, Any]:
    """Return the description of a model, with the types that JSON keeps."""
    layers: dict[str, dict[str, Any]] = {}
    for name, layer in zip(structure.undivided_names, structure.layers, strict=True):
        described_layer = layers.setdefault(name, {})
        for spec in layer.parameters:
            whole = whole_name(spec.name)
            shape = joined_shape(described_layer.get(whole, {}).get("shape"), spec.shape)  # of the parts so far
            frozen = {} if spec.group.trained else {"frozen": True}  # not in what earlier versions wrote
            described_layer[whole] = {"shape": shape, "tied_to": spec.tied_to, **frozen}
    relevant = {key: value for key, value in config.items() if key not in IRRELEVANT}
    described: dict[str, Any] = json.loads(json.dumps({"config": relevant, "layers": layers}))
    return described
