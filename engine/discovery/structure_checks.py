"""Checks in the trial forward that a model uses its parameters in a way that allows streaming layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatrain_ray.engine.discovery.trial_forward import Trial
from megatrain_ray.engine.model.lora import is_adapter, module_of
from megatrain_ray.engine.model.structure import LayerSpec, kept_in_fp32
from megatrain_ray.errors import ConfigError


def check_parameters(model: nn.Module, trial: Trial, layers: Sequence[LayerSpec]) -> None:
    """Raise ConfigError for a parameter that cannot be assigned to a layer. The error names it."""
    _check_reads(model, trial, layers)
    _check_pairs(trial, layers)
    _check_types(model, layers)


def _check_reads(model: nn.Module, trial: Trial, layers: Sequence[LayerSpec]) -> None:
    """Raise ConfigError unless every parameter is read while a module of the schedule that holds it runs."""
    names = {id(p): name for name, p in model.named_parameters()}
    held = {
        path: {names[id(p)] for p in model.get_submodule(path).parameters()}
        for layer in layers
        for path in layer.modules
    }
    for parameter, readers in trial.reads.items():
        for reader in readers:
            around = [path for path in held if reader == path or reader.startswith(path + ".")]
            if not any(parameter in held[path] for path in around):
                raise ConfigError(
                    f"{type(model).__name__}: parameter {parameter} belongs to no layer: it is read "
                    f"{'in ' + reader if reader else 'by the model itself'}; not supported yet"
                )


def _check_pairs(trial: Trial, layers: Sequence[LayerSpec]) -> None:
    """Raise ConfigError for a LoRA pair whose matrix is read without a call of its module.

    The pair would never compute.
    """
    reads = trial.reads
    for name in [p.name for layer in layers for p in layer.parameters if is_adapter(p.name)]:
        if name not in reads and f"{module_of(name)}.weight" in reads:
            raise ConfigError(
                f"lora.match: the matrix of {module_of(name)} is read without a call of the module, so a pair "
                "beside it would never compute; make the pattern narrower"
            )


def _check_types(model: nn.Module, layers: Sequence[LayerSpec]) -> None:
    """Raise ConfigError if the model would keep a parameter of a layer in FP32 while the rest is BF16.

    Everything that is streamed has one type.
    """
    dtype = next(model.parameters()).dtype
    for name in [p.name for layer in layers for p in layer.parameters]:
        if dtype != torch.float32 and kept_in_fp32(model, name):
            raise ConfigError(
                f"{type(model).__name__} keeps {name} in FP32 whatever the rest is: set train.precision: fp32 or tf32"
            )
