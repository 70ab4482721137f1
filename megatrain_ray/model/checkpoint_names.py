"""Finds which tensors Transformers writes to a checkpoint of a model, by running its conversion on the meta device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain_ray.io.checkpoints.weight_map import CheckpointTensor, WeightMap, check_covered


class _CopiesAreViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes every clone a view, so that storage, offset and strides still tell where its elements came from."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0].view_as(args[0]) if func is torch.ops.aten.clone.default else func(*args, **kwargs or {})


def checkpoint_names(model: nn.Module) -> WeightMap:
    """Return the checkpoint tensors of each parameter that a checkpoint holds under other names or in pieces.

    model: a transformers PreTrainedModel on the meta device.

    Parameters whose conversion is more than taking views are left out too: a folder must hold them as they are.

    Raises ConfigError for a parameter that a checkpoint holds in pieces that cannot be read one by one.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return _renamed(model)
    parameters = {name: model.get_parameter(name).detach() for name in owned_parameters(model)}
    owners = {p.untyped_storage()._cdata: name for name, p in parameters.items()}
    with _CopiesAreViews():  # type: ignore[no-untyped-call]
        written = revert_weight_conversion(model, dict(parameters))
    found: dict[str, list[CheckpointTensor]] = {}
    for name, tensor in written.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is not None:
            place = CheckpointTensor(name, tuple(tensor.shape), tensor.storage_offset(), tensor.stride())
            found.setdefault(owner, []).append(place)
    converted = {owner: tensors for owner, tensors in found.items() if [t.name for t in tensors] != [owner]}
    for owner, tensors in converted.items():
        check_covered(owner, parameters[owner].numel(), tensors)
    return converted


def _renamed(model: nn.Module) -> WeightMap:
    """Return the renamed parameters of a vision-language model in Transformers 4, which converts nothing else."""
    from transformers.modeling_utils import VLMS

    lineage = [base.__name__.lower() for base in type(model).__mro__]
    if not any(family in name for name in lineage for family in VLMS):
        return {}
    renames: Mapping[str, str] = model._checkpoint_conversion_mapping  # type: ignore[assignment]  # stored → own
    found: dict[str, list[CheckpointTensor]] = {}
    for name in owned_parameters(model):
        stored = next((new for kept, own in renames.items() if (new := re.sub(own, _plain(kept), name)) != name), name)
        if stored != name:
            found[name] = [CheckpointTensor.whole(stored, tuple(model.get_parameter(name).shape))]
    return found


def _plain(pattern: str) -> str:
    """Return the text that a pattern of names stands for, without its anchor and conditions."""
    return re.sub(r"\(.*\)", "", pattern.removeprefix("^"))


def owned_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters, tied ones once.

    They are compared by storage, because on the meta device a tied parameter may be several objects.
    """
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        first.setdefault(parameter.untyped_storage()._cdata, name)
    return list(first.values())
