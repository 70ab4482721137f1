"""Exports a save as a Hugging Face folder: the working copy as it is, or the exact FP32 masters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatrain_ray.engine.layout.expert_names import joined_shape, whole_name
from megatrain_ray.engine.weights.saved_values import ExportValues, Read, SavedValues, chunks
from megatrain_ray.io.checkpoints.weight_map import CheckpointTensor, WeightMap
from megatrain_ray.io.checkpoints.write_checkpoint import FILE_BYTES, ExportDtype, ExportTensor, write_model_folder
from megatrain_ray.io.saves.manifest import Manifest, ParameterEntry


def export_save(
    save_folder: Path, manifest: Manifest, out_dir: Path, dtype: ExportDtype | None = None,
    file_bytes: int = FILE_BYTES, copies: Sequence[Path] = (), names: WeightMap | None = None,
    rest: Sequence[ExportTensor] = (),
) -> None:  # fmt: skip
    """Export the save to `out_dir`. Tied parameters are written once.

    dtype: type of the exported values; None: the working copy's. What the model reads in FP32 beside bf16 stays FP32.
    file_bytes: largest size of one file.
    copies: files to copy into the folder with the model.
    names: what a checkpoint calls the parameters, and how it divides them.
    rest: tensors to write that are not part of the save.

    Raises ConfigError unless `out_dir` is new or empty. Raises MegatrainError naming the blob if the save is damaged,
    and if writing fails. In these cases there is no `out_dir` afterwards.
    """
    with SavedValues.open(save_folder, manifest) as values:
        chosen = dtype or values.dtype
        tensors = export_tensors(values, owned(manifest), chosen, names)
        write_model_folder(
            out_dir, [*tensors, *rest], chosen, manifest.model, manifest.generation_config, file_bytes, copies
        )


def owned(manifest: Manifest) -> list[ParameterEntry]:
    """Return the save's parameters that have elements of their own, ranges of experts joined to whole parameters."""
    return whole(p for layer in manifest.layers for p in layer.parameters if p.tied_to is None)


def whole(parameters: Iterable[ParameterEntry]) -> list[ParameterEntry]:
    """Return the whole parameters that these are ranges of, each with the `start` of its first range."""
    found: dict[str, ParameterEntry] = {}
    for p in parameters:  # ranges of experts follow each other
        name = whole_name(p.name)
        before = found.get(name)
        found[name] = replace(before or p, name=name, shape=joined_shape(before.shape if before else None, p.shape))
    return list(found.values())


def export_tensors(
    values: ExportValues, parameters: Iterable[ParameterEntry], dtype: ExportDtype, names: WeightMap | None
) -> list[ExportTensor]:
    """Return the checkpoint's tensors for these parameters. `names`: as for export_save."""
    pieces: dict[str, list[tuple[Read, CheckpointTensor]]] = {}
    types: dict[str, torch.dtype] = {}
    for p in parameters:
        of_parameter = ExportDtype.FP32 if p.fp32 else dtype  # as Transformers saves a bf16 model
        for t in (names or {}).get(p.name) or [CheckpointTensor.whole(p.name, p.shape)]:
            pieces.setdefault(t.name, []).append((partial(values.read, p.name, dtype=of_parameter), t))
            types.setdefault(t.name, of_parameter.torch)
    return [
        ExportTensor(name, parts[0][1].place.shape, partial(chunks, parts, types[name]), types[name])
        for name, parts in pieces.items()
    ]
