"""Chooses the parameters that Muon trains: the matrices of a model's blocks, unless a group says otherwise."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.nn.modules.conv import _ConvNd

from megatrain_ray.engine.layout.flat_layout import ParameterSpec
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.errors import ConfigError

DIMENSIONS = (2, 3)  # of a matrix; of a stack of matrices, one per expert


def with_muon(structure: ModelStructure, model: nn.Module) -> ModelStructure:
    """Return the structure with those parameters marked that Muon trains.

    A convolution's weight does not count as a matrix, nor does a stack of biases, nor a table whose rows are looked up.

    Raises ConfigError if a group gives Muon a parameter of other than 2 or 3 dimensions, or if Muon has nothing to
    train.
    """
    layers = tuple(
        replace(
            layer,
            parameters=tuple(
                replace(p, muon=_by_muon(p, structure, model, in_block=layer.kind is LayerKind.BLOCK))
                for p in layer.parameters
            ),
        )
        for layer in structure.layers
    )
    if not any(p.muon for layer in layers for p in layer.parameters):
        raise ConfigError(
            "train.optimizer: muon has no matrix of the model's layers to train: they are frozen, or left to AdamW by "
            "train.groups; set adamw"
        )
    return replace(structure, layers=layers)


def _by_muon(p: ParameterSpec, structure: ModelStructure, model: nn.Module, *, in_block: bool) -> bool:
    if not p.group.trained or p.tied_to:
        return False
    if p.group.muon and len(p.shape) not in DIMENSIONS:
        raise ConfigError(
            f"train.groups: optimizer: muon is for matrices and stacks of them, and {p.name} has {len(p.shape)} "
            "dimensions; match less, or leave it to adamw"
        )
    if p.group.muon is not None:
        return p.group.muon
    path, _, local = p.name.rpartition(".")
    is_table = p.name in structure.looked_up or isinstance(model.get_submodule(path), _ConvNd)
    return in_block and len(p.shape) in DIMENSIONS and not is_table and not local.endswith("bias")
