"""Measures in a trial forward what a model's layers leave on the device between their forward and their backward.

It also finds the blocks whose inputs no other module reads in between: such inputs may be offloaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.block_parts import glue_saved
from megatrain_ray.engine.discovery.trial_forward import Call, Trial, storages_of, tensors_in, unique_bytes
from megatrain_ray.engine.model.attention import Attention, mask_bytes
from megatrain_ray.engine.model.structure import Entered, LayerKind, LayerSpec, Mlp, ModelStructure


def activation_bytes_of(
    model: nn.Module, trial: Trial, structure: ModelStructure, attention: Attention, batch: tuple[int, int]
) -> ActivationBytes:
    """Measure the activation bytes in a trial forward of `batch` = [sequences, tokens].

    Parameters that are frozen in the model make layers keep less.
    """
    weights = storages_of(model.parameters())
    boundary, kept, in_chunks, of_blocks = [], [], [], list[torch.Tensor]()
    for layer in structure.layers:
        calls = [trial.first[path] for path in layer.modules]
        boundary.append(unique_bytes(t for t in calls[0].inputs if t.requires_grad))
        own = [call for call in calls if call.path not in structure.loss_modules]
        kept.append(sum(_kept(trial, call, weights) for call in own))
        of_norms = sum(_kept(trial, call, weights) for call in own if call.path in structure.norms)
        in_chunks.append(_kept_besides(trial, own[0], layer.mlp, weights) if layer.mlp else kept[-1] - of_norms)
        if layer.kind is LayerKind.BLOCK and layer.rows_per_token is None:
            of_blocks += calls[0].inputs
    private = _private_inputs(model, trial, structure)
    before = (structure.layers[0], *structure.layers)
    replayable = tuple(
        is_private and _is_made_by(trial, *two)
        for is_private, *two in zip(private, before, structure.layers, strict=False)
    )
    masks = mask_bytes(attention, of_blocks, *batch)
    whole = ActivationBytes(tuple(boundary), tuple(kept), masks, private=private, replayable=replayable)
    if structure.is_divided:
        return _with_parts(whole, trial, structure, weights)
    chunked = replace(whole, kept=tuple(in_chunks)) if any(layer.mlp for layer in structure.layers) else None
    return replace(whole, chunked=chunked)


def _with_parts(whole: ActivationBytes, trial: Trial, structure: ModelStructure, weights: set[int]) -> ActivationBytes:
    """Return `whole`, which is right except for divided blocks, corrected for these."""
    boundary, kept, between = list(whole.boundary), list(whole.kept), [0] * len(whole.kept)
    for block in structure.blocks:
        parts = [structure.layers[i] for i in block]
        given = storages_of(tensor for part in parts for path in part.modules for tensor in trial.first[path].inputs)
        for k, (i, layer) in enumerate(zip(block, parts, strict=True)):
            assert layer.part is not None  # if one block is divided, all are
            boundary[i] = unique_bytes(_entered(trial, layer.part.leaving))
            between[i] = unique_bytes(glue_saved(trial, parts, k), weights | given)
            kept[i] += between[i]
    never = (False,) * len(kept)
    return replace(whole, boundary=tuple(boundary), kept=tuple(kept), between=tuple(between), replayable=never)


def _kept(trial: Trial, call: Call, weights: set[int]) -> int:
    return unique_bytes(trial.saved[slice(*call.saved)], weights | storages_of(call.inputs))


def _kept_besides(trial: Trial, call: Call, mlp: Mlp, weights: set[int]) -> int:
    """Return the bytes kept by a block whose MLP keeps only its input."""
    inner = trial.first[f"{call.path}.{mlp.path}"]
    (first, stop), (start, end) = call.saved, inner.saved
    saved = [*trial.saved[first:start], *trial.saved[end:stop], *inner.inputs]
    return unique_bytes(saved, weights | storages_of(call.inputs))


def _private_inputs(model: nn.Module, trial: Trial, structure: ModelStructure) -> tuple[bool, ...]:
    """Return for each layer whether its inputs are private: only the layer reads them from its forward to its backward.

    trial: trial forward of the model with all of its parameters trained.
    """
    # A layer that returns a float without a gradient, for instance a mask: in a step it begins at a leaf, like every
    # float that a layer returns. So more tensors would enter later layers, and be offloaded, than the trial shows.
    returned = [t for layer in structure.layers[:-1] for p in layer.modules for t in tensors_in(trial.first[p].output)]
    if any(tensor.is_floating_point() and not tensor.requires_grad for tensor in returned):
        return (False,) * len(structure.layers)
    # A weight is part of a slot. A loss, which the trial did not run, may read what the base model returns.
    shared = storages_of(model.parameters()) | trial.returned_by(structure.base)
    return tuple(
        layer.kind is LayerKind.BLOCK and _has_private_inputs(trial, layer, shared) for layer in structure.layers
    )


def _has_private_inputs(trial: Trial, layer: LayerSpec, shared: set[int]) -> bool:
    """Return whether nothing uses a block's inputs after its call, neither a later operation nor a backward.

    No operation outside of the call may have saved them for its backward, and they may not be in `shared`. For a part
    of a block the inputs are the tensors offloaded after it, whichever part they entered.
    """
    call = trial.first[layer.part.block if layer.part else layer.modules[0]]
    entering = _entered(trial, layer.part.leaving) if layer.part else [t for t in call.inputs if t.requires_grad]
    storages, (first, stop) = storages_of(entering), call.saved
    outside = storages_of((*trial.saved[:first], *trial.saved[stop:]))
    read_later = any(trial.touched.get(storage, 0) >= call.stop for storage in storages)
    return not read_later and not storages & (shared | outside)


def _entered(trial: Trial, places: Iterable[Entered]) -> list[torch.Tensor]:
    values = (tree_leaves(trial.first[path].contents)[position] for path, position in places)
    return [tensor for tensor in tensors_in(list(values)) if tensor.requires_grad]


def _is_made_by(trial: Trial, before: LayerSpec, layer: LayerSpec) -> bool:
    """Return whether the block `before` makes all inputs of the block `layer` that require a gradient.

    They must enter unchanged, and none may share memory with an input of `before`.
    """
    if before.kind is not LayerKind.BLOCK or layer.kind is not LayerKind.BLOCK:
        return False
    first, second = trial.first[before.modules[0]], trial.first[layer.modules[0]]
    entering = storages_of(tensor for tensor in second.inputs if tensor.requires_grad)
    made = first.left.keys() - storages_of(first.inputs)
    return entering <= made and all(first.left[storage] == second.entered[storage] for storage in entering)
