"""`megatrain export`: the newest save of a run as a Hugging Face folder."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatrain_ray.architecture import Architecture, is_known
from megatrain_ray.checkpoint_names import checkpoint_names, owned_parameters
from megatrain_ray.config import ModelConfig
from megatrain_ray.engine.export_save import export_save
from megatrain_ray.engine.load import WeightSource
from megatrain_ray.engine.model import build_empty
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.export import ExportDtype, ExportTensor
from megatrain_ray.io.manifest import Manifest
from megatrain_ray.io.save import list_saves, load_manifest, save_folder
from megatrain_ray.io.weight_map import CheckpointTensor, WeightMap
from megatrain_ray.logs import say
from megatrain_ray.model_source import open_model
from megatrain_ray.run_dir import RunFiles

MAX_TRIES = 5


def export_run(run_dir: Path, out_dir: Path, dtype: str | None) -> None:
    """`dtype`: bf16, fp32, or None for the working copy's. The tokenizer's files go with the weights.

    Raises ConfigError for a folder that holds no run or no save, and for an OUT_DIR that is in use; MegatrainError for
    a damaged save. OUT_DIR appears whole or not at all.
    """
    files = RunFiles(run_dir.absolute())
    model = files.read_config().model
    chosen = ExportDtype(dtype) if dtype else None
    for _ in range(MAX_TRIES):
        saves = list_saves(files.saves)
        if not saves:
            raise ConfigError(f"{run_dir} holds no save yet: train until one is made (save_every), then export")
        step = saves[-1]
        try:
            return _export(files, step, out_dir, chosen, model)
        except MegatrainError:
            if step in list_saves(files.saves):
                raise
            say(f"the save of step {step} was deleted by the run that goes on before it was read: taking the next one")
    raise MegatrainError(
        f"{MAX_TRIES} saves were deleted before they were read: set a larger save_keep or save_every, or export when "
        "the run is over"
    )


def load_exported(folder: Path) -> Any:
    """A PreTrainedModel. Raises ConfigError for one with code of its own, which an export does not hold."""
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not is_known(settings["model_type"]):
        raise ConfigError(
            f"a {settings['model_type']} model comes with code of its own: export it, and load it with that code"
        )
    return Architecture(settings).load(folder)


def _export(files: RunFiles, step: int, out_dir: Path, dtype: ExportDtype | None, model: ModelConfig) -> None:
    folder, manifest = save_folder(files.saves, step), load_manifest(files.saves, step)
    names, rest = beside_the_save(model, manifest)
    export_save(folder, manifest, out_dir, dtype, copies=files.tokenizer_files(), names=names, rest=rest)


def beside_the_save(config: ModelConfig, manifest: Manifest) -> tuple[WeightMap, list[ExportTensor]]:
    """What a checkpoint of the model calls its tensors, and those that the run never trained, in FP32: parameters that
    a text does not reach and persistent buffers.

    These come from where the run began: raises ConfigError when that folder is gone and something of it is needed.
    """
    if not is_known(manifest.model.get("model_type")):
        return {}, []  # a model's own code has its own names
    empty = build_empty(Architecture(dict(manifest.model)), torch.float32)
    names = checkpoint_names(empty)
    held = {p.name for layer in manifest.layers for p in layer.parameters}
    parameters = [name for name in owned_parameters(empty) if name not in held]
    buffers = [name for name in empty.state_dict() if name in dict(empty.named_buffers())]
    if not parameters and not buffers:
        return names, []
    source = open_model(config)
    weights, with_buffers = source.weights(), build_empty(source.factory, torch.float32)
    rest = [
        ExportTensor(t.name, t.shape, partial(_read, weights, name, t), ExportDtype.FP32)
        for name in parameters
        for t in names.get(name) or [CheckpointTensor.whole(name, tuple(empty.get_parameter(name).shape))]
    ]
    for name in buffers:
        values = with_buffers.get_buffer(name).float()
        rest.append(ExportTensor(name, tuple(values.shape), partial(_bytes, values), ExportDtype.FP32))
    return names, rest


def _read(weights: WeightSource, name: str, tensor: CheckpointTensor) -> list[memoryview]:
    values = weights.read(name, tensor.offset, tensor.stop)
    return _bytes(values.as_strided(tensor.shape, tensor.stride))


def _bytes(values: torch.Tensor) -> list[memoryview]:
    return [values.contiguous().view(-1).view(torch.uint8).numpy().data]
