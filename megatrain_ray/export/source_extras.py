"""Finds what an export needs that no save holds: names of tensors, untrained ones, and leftovers of the source."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.logs import say
from megatrain_ray.engine.layout.expert_names import whole_name
from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.leftovers import Leftovers, checksum, find_leftovers, leftover_files, without_links
from megatrain_ray.io.checkpoints.safetensors_folder import WeightFolder
from megatrain_ray.io.checkpoints.weight_map import WeightMap
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype, ExportTensor, copied
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.tokens.tokenizer import FILE_NAMES, TEMPLATE_NAMES
from megatrain_ray.model.architecture import Architecture, base_prefix, checkpoint_names, is_known, known_names
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.model.open_model import open_model, read_model
from megatrain_ray.model.untrained_tensors import untrained_tensors
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_model import read_leftovers

VOCABULARIES = (".model", ".tiktoken", ".bpe", ".spm")  # of tokenizers


def with_own_code(model: ModelConfig, manifest: Manifest) -> ModelSource | None:
    """Return the source of a model that Transformers does not have; None if it has the model."""
    return None if is_known(manifest.model.get("model_type")) else open_model(model)


def empty_model(source: ModelSource | None, manifest: Manifest) -> nn.Module:
    """Return the model without weights, built by its own code or by Transformers."""
    return build_empty(source.factory if source else Architecture(dict(manifest.model)), torch.float32)


@dataclass(frozen=True)
class ExportExtras:
    """Holds what an export needs that no save holds.

    model: the model without weights.
    names: what a checkpoint of the model calls its tensors.
    rest: tensors that the run did not train, exported as they are.
    code: files of the model's own code.
    """

    model: nn.Module
    names: WeightMap
    rest: Sequence[ExportTensor] = ()
    code: Sequence[Path] = ()


def export_extras(config: ModelConfig, manifest: Manifest, dtype: ExportDtype = ExportDtype.FP32) -> ExportExtras:
    """Return what an export needs in addition to a save, from the folder that the run began with.

    `rest` are the parameters that text does not reach and the persistent buffers.

    dtype: type of the export, to which quantised ones are dequantised.

    Raises ConfigError if that folder is gone and something of it is needed.
    """
    source = with_own_code(config, manifest)
    empty = empty_model(source, manifest)
    names = checkpoint_names(empty)
    held = {whole_name(p.name) for layer in manifest.layers for p in layer.parameters}
    code = sorted(source.code.glob("*.py")) if source and source.code else ()
    rest = untrained_tensors(empty, names, held, dtype, lambda name: source or _open(config, name))
    return ExportExtras(empty, names, rest, code)


def _open(config: ModelConfig, needed: str) -> ModelSource:
    try:
        return open_model(config)
    except ConfigError as error:
        raise ConfigError(
            f"an export has {needed}, which the run did not train, from the model that it began with, which cannot be "
            f"read now: {error}"
        ) from None


@dataclass(frozen=True)
class SourceRest:
    """Holds what an export takes over from the folder that the run began with, beyond the model."""

    tensors: Sequence[ExportTensor] = ()
    files: Sequence[Path] = ()


def source_rest(
    files: RunFiles, config: TrainConfig, needed: ExportExtras, dtype: ExportDtype, written: Collection[str]
) -> SourceRest:
    """Return the tensors and files of the folder that the run began with which are exported as they were; say which.

    dtype: type of the export, to which quantised tensors are dequantised.
    written: names of the files that the export has from elsewhere.

    Raises ConfigError if tensors were there when the run began, and are gone or others.
    """
    recorded, model = read_leftovers(files.path), config.model
    if model.path is None:
        return SourceRest()
    try:
        folder = WeightFolder.open(_folder(model), base_prefix(needed.model))
        found = find_leftovers(folder, known_names(needed.model, needed.names))
        if config.train.objective == "reward":  # a head for tokens, for example, has no use there
            found = Leftovers(left_out=found.left_out)
        # Another version of Transformers may know more or fewer names. What was recorded says whether the folder is as
        # it was.
        changed = recorded is not None and recorded.crc32 != checksum(folder, recorded.tensors)
    except ConfigError as error:
        if recorded is not None and recorded.tensors:
            raise _unlike(model.path, recorded, f"cannot be read now: {error}") from None
        say(f"note: only the model is exported: {error}")
        return SourceRest()
    if recorded is not None and changed:
        raise _unlike(model.path, recorded, f"has {found if found.tensors else 'none'} now")
    wanted = [file for file in leftover_files(folder.path) if _is_wanted(file.name, config, written)]
    copies = published(wanted, folder.path)
    if found.left_out:
        say(f"note: tensors of types that torch lacks are not exported: {', '.join(found.left_out)}")
    kept = [str(found)] * bool(found.tensors) + [file.name for file in copies]
    if kept:
        say(f"kept as they were in {model.path}: {', '.join(kept)}")
    return SourceRest([copied(folder, name, dtype) for name in found.tensors], copies)


def published(files: Sequence[Path], folder: Path) -> list[Path]:
    """Return the files without links that lead out of their folder; say which are left out."""
    copies, note = without_links(files, folder)
    if note:
        say(note)
    return copies


def _folder(config: ModelConfig) -> Path:
    folder = read_model(config).folder
    assert folder is not None  # model.path is set
    return folder


def _unlike(path: str, recorded: Leftovers, now: str) -> ConfigError:
    what = recorded if recorded.tensors else "no tensors"
    return ConfigError(
        f"model.path: {path} held {what} beyond the model when the run began, which an export keeps as they were, and "
        f"{now}; bring the folder back as it was, or export without them: --no-extras"
    )


def _is_wanted(name: str, config: TrainConfig, written: Collection[str]) -> bool:
    """Return whether an export copies a file of the model's folder. Files of the tokenizer come from the run."""
    if name in written:
        return False
    is_own = config.tokenizer == config.model.path
    of_template = name in TEMPLATE_NAMES and "chat_template.jinja" in written
    of_tokenizer = name in (*FILE_NAMES, *TEMPLATE_NAMES, "vocab.txt") and "processor" not in name
    return not of_template and (is_own or not (of_tokenizer or name.endswith(VOCABULARIES)))
