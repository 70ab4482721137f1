"""Of which blocks nothing but the block itself reads what enters it, from its forward to its backward: that may leave
the device in between. Found in the trial forward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatrain_ray.engine.discovery.trial_forward import Call, Trial
from megatrain_ray.engine.model.structure import Entered, LayerKind, LayerSpec, ModelStructure


def private_inputs(model: nn.Module, trial: Trial, structure: ModelStructure) -> tuple[bool, ...]:
    """One answer a layer. `trial`: of the model with all of its parameters trained."""
    if _hand_on_constants(trial, structure):
        return (False,) * len(structure.layers)
    # A weight is part of a slot. What the base model returns a loss may read, which the trial did not run.
    shared = storages_of(model.parameters()) | storages_of(returned_tensors(trial, structure.base))
    return tuple(_has_private_inputs(trial, layer, shared) for layer in structure.layers)


def is_made_by(trial: Trial, before: LayerSpec, layer: LayerSpec) -> bool:
    """Whether all that needs a gradient of what enters a block is as the block before made it, none of it in memory
    that entered that."""
    if before.kind is not LayerKind.BLOCK or layer.kind is not LayerKind.BLOCK:
        return False
    first, second = trial.first(before.modules[0]), trial.first(layer.modules[0])
    if first is None or second is None:
        return False
    entering = storages_of(tensor for tensor in second.inputs if tensor.requires_grad)
    made = first.left.keys() - storages_of(first.inputs)
    return entering <= made and all(first.left[storage] == second.entered[storage] for storage in entering)


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """By identity."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _hand_on_constants(trial: Trial, structure: ModelStructure) -> bool:
    """Whether a layer returns a float that needs no gradient, a mask for instance. In a step that begins at a leaf, as
    all floats do that a layer returns: more would enter later layers, and leave, than is seen here."""
    calls = (trial.first(path) for layer in structure.layers[:-1] for path in layer.modules)
    returned = (value for call in calls if call for value in _tensors(call.output))
    return any(tensor.is_floating_point() and not tensor.requires_grad for tensor in returned)


def returned_tensors(trial: Trial, base: str) -> list[torch.Tensor]:
    """By the base model."""
    call = trial.first(base)
    return _tensors(vars(call.output)) if call else []


def _has_private_inputs(trial: Trial, layer: LayerSpec, shared: set[int]) -> bool:
    """Of a part of a block: what leaves behind it, whichever part it entered."""
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
    """What entered there in the trial, where it wants a gradient."""
    calls = ((trial.first(path), position) for path, position in places)
    values = (tree_leaves(call.arguments.contents)[position] for call, position in calls if call)
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


def _is_private(trial: Trial, call: Call, storages: set[int], shared: set[int]) -> bool:
    """Nobody has these after the call, and no operation outside of it saved them for its backward."""
    first, stop = call.saved
    outside = storages_of((*trial.saved[:first], *trial.saved[stop:]))
    read_later = any(trial.touched.get(storage, 0) >= call.stop for storage in storages)
    return not read_later and not storages & (shared | outside)


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
