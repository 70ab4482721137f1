"""Writes the weights that a run computes with as a model folder, for a server that samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.model.lora import is_adapter
from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.engine.weights.export_save import export_tensors
from megatrain_ray.engine.weights.lora_values import MergedValues, Pair, pairs_of
from megatrain_ray.engine.weights.saved_values import ExportValues
from megatrain_ray.engine.weights.working_values import WorkingValues
from megatrain_ray.io.checkpoints.quantisation import without_quantisation
from megatrain_ray.io.checkpoints.weight_map import WeightMap
from megatrain_ray.io.checkpoints.write_checkpoint import ExportTensor, write_model_folder
from megatrain_ray.model.architecture import checkpoint_names
from megatrain_ray.model.untrained_tensors import untrained_tensors
from megatrain_ray.planning.run_spec import RunSpec


class _Described(NamedTuple):
    """Holds what all folders of a run have in common.

    model: without weights and LoRA pairs.
    rest: tensors that the run does not hold.
    """

    model: nn.Module
    names: WeightMap
    rest: Sequence[ExportTensor]
    pairs: dict[str, Pair]


class ServedWeights:
    """Writes folders of a run's weights. LoRA pairs are merged in."""

    def __init__(self, run_spec: RunSpec, layout: ModelLayout, flat_of: Callable[[int], Tensor]) -> None:
        """Get ready. `flat_of`: as for WorkingValues."""
        self._run_spec = run_spec
        self._values = WorkingValues(layout, run_spec.plan.precision, flat_of)

    def write(self, out_dir: Path) -> None:
        """Write config.json and all weights, as `write_model_folder` does. No update may be under way."""
        values, found, settings = self._values, self._described, self._run_spec.source.config
        merged: ExportValues = values
        if lora := self._run_spec.config.lora:
            fp32 = {p.name for p in values.parameters if p.fp32}
            merged = MergedValues(values, values, found.pairs, lora.alpha / lora.rank, fp32)
        parameters = [p for p in values.parameters if not is_adapter(p.name)]
        tensors = export_tensors(merged, parameters, values.dtype, found.names)
        settings = {
            **without_quantisation(settings),
            "architectures": settings.get("architectures") or [type(found.model).__name__],
        }
        write_model_folder(out_dir, [*tensors, *found.rest], values.dtype, settings)

    @cached_property
    def _described(self) -> _Described:
        source = replace(self._run_spec.source, lora=None, expert_groups=1, fp8=False)
        model = build_empty(source.factory, torch.float32)
        shapes = {p.name: p.shape for p in self._values.parameters}
        names = checkpoint_names(model)
        rest = untrained_tensors(model, names, shapes, self._values.dtype, lambda name: source)
        return _Described(model, names, rest, pairs_of(shapes, model))
