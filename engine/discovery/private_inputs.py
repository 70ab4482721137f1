"""Finds blocks whose inputs are read by no other module between their forward and their backward.

Such inputs may be offloaded in between. They are found in the trial forward.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatrain_ray.engine.discovery.trial_forward import Call, Trial
from megatrain_ray.engine.model.structure import Entered, LayerKind, LayerSpec, ModelStructure


def private_inputs(model: nn.Module, trial: Trial, structure: ModelStructure) -> tuple[bool, ...]:
    """Return for each layer whether its inputs are private.

    trial: trial forward of the model with all of its parameters trained.
    """
    if _hand_on_constants(trial, structure):
        return (False,) * len(structure.layers)
    # A weight is part of a slot. A loss, which the trial did not run, may read what the base model returns.
    shared = storages_of(model.parameters()) | storages_of(returned_tensors(trial, structure.base))
    return tuple(_has_private_inputs(trial, layer, shared) for layer in structure.layers)


def is_made_by(trial: Trial, before: LayerSpec, layer: LayerSpec) -> bool:
    """Return whether the block `before` makes all inputs of the block `layer` that require a gradient.

    They must enter unchanged, and none may share memory with an input of `before`.
    """
    if before.kind is not LayerKind.BLOCK or layer.kind is not LayerKind.BLOCK:
        return False
    first, second = trial.first(before.modules[0]), trial.first(layer.modules[0])
    if first is None or second is None:
        return False
    entering = storages_of(tensor for tensor in second.inputs if tensor.requires_grad)
    made = first.left.keys() - storages_of(first.inputs)
    return entering <= made and all(first.left[storage] == second.entered[storage] for storage in entering)


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the storages of the tensors, by identity."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _hand_on_constants(trial: Trial, structure: ModelStructure) -> bool:
    """Return whether a layer returns a float that requires no gradient, for instance a mask.

    In a step such a float begins at a leaf, like every float that a layer returns. So more tensors would enter later
    layers, and be offloaded, than the trial shows.
    """
    calls = (trial.first(path) for layer in structure.layers[:-1] for path in layer.modules)
    returned = (value for call in calls if call for value in _tensors(call.output))
    return any(tensor.is_floating_point() and not tensor.requires_grad for tensor in returned)


def returned_tensors(trial: Trial, base: str) -> list[torch.Tensor]:
    """Return the tensors that the base model returned."""
    call = trial.first(base)
    return _tensors(vars(call.output)) if call else []


def _has_private_inputs(trial: Trial, layer: LayerSpec, shared: set[int]) -> bool:
    """Return whether the inputs of the layer are private.

    For a part of a block these are the tensors offloaded after it, whichever part they entered.
    """
    if layer.kind is not LayerKind.BLOCK:
        return False
    block = trial.first(layer.part.block if layer.part else layer.modules[0])
    if block is None:
        return False
    if layer.part is None:
        entering = [tensor for tensor in block.inputs if tensor.requires_grad]
    else:
        entering = entered(trial, layer.part.leaving)
    return _is_private(trial, block, storages_of(entering), shared)


def entered(trial: Trial, places: Iterable[Entered]) -> list[torch.Tensor]:
    """Return the tensors that entered at `places` in the trial and require a gradient."""
    calls = ((trial.first(path), position) for path, position in places)
    values = (tree_leaves(call.arguments.contents)[position] for call, position in calls if call)
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


def _is_private(trial: Trial, call: Call, storages: set[int], shared: set[int]) -> bool:
    """Return whether nothing uses the storages after the call, neither a later operation nor a backward.

    No operation outside of the call may have saved them for its backward, and they may not be in `shared`.
    """
    first, stop = call.saved
    outside = storages_of((*trial.saved[:first], *trial.saved[stop:]))
    read_later = any(trial.touched.get(storage, 0) >= call.stop for storage in storages)
    return not read_later and not storages & (shared | outside)


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
