"""Finds tensors of a checkpoint that a run does not hold, so that an export takes them from the model it began with."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import nn

from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.engine.weights.saved_values import chunks
from megatrain_ray.io.checkpoints.safetensors_folder import WeightFolder
from megatrain_ray.io.checkpoints.weight_map import CheckpointTensor, WeightMap
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype, ExportTensor, copied
from megatrain_ray.model.architecture import owned_parameters, persistent_buffers
from megatrain_ray.model.model_source import ModelSource


def untrained_tensors(
    empty: nn.Module, names: WeightMap, held: Collection[str], dtype: ExportDtype,
    source_of: Callable[[str], ModelSource],
) -> list[ExportTensor]:  # fmt: skip
    """Return the parameters that text does not reach and the persistent buffers, as the model began with them.

    empty: the model without weights.
    names: what a checkpoint of the model calls its tensors.
    held: parameters that the run holds.
    dtype: type of the export, to which quantised ones are dequantised.
    source_of: returns where the model began; called with a name that is needed of it, if any is.
    """
    parameters = [name for name in owned_parameters(empty) if name not in held]
    buffers = persistent_buffers(empty)
    if not parameters and not buffers:
        return []
    source = source_of((parameters or list(buffers))[0])
    shapes = {name: tuple(empty.get_parameter(name).shape) for name in parameters}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    whole = {name: [CheckpointTensor.whole(name, shape)] for name, shape in shapes.items()}
    pieces: dict[str, list[tuple[str, CheckpointTensor]]] = {}
    for name in shapes:
        for tensor in names.get(name) or whole[name]:
            pieces.setdefault(tensor.name, []).append((name, tensor))
    stored = WeightFolder.open(source.folder, source.prefix) if source.folder else None
    rest = [copied(stored, name, dtype) for name in pieces if stored and stored.holds(name)]
    left = pieces.keys() - {tensor.name for tensor in rest}
    if left:
        weights, made = source.weights(), build_empty(source.factory, torch.float32)

        def read(owner: str, start: int, stop: int) -> torch.Tensor:
            computed = owner in buffers
            return made.get_buffer(owner).flatten()[start:stop] if computed else weights.read(owner, start, stop)

        for name, parts in pieces.items():
            if name in left:
                of_owner = buffers[parts[0][0]].dtype if parts[0][0] in buffers else torch.float32
                content = partial(chunks, [(partial(read, owner), tensor) for owner, tensor in parts], of_owner)
                rest.append(ExportTensor(name, parts[0][1].place.shape, content, of_owner))
    return rest
