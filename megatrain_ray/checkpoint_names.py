"""Which tensors Transformers writes to a checkpoint for a model: its own conversion, followed on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain_ray.io.weight_map import CheckpointTensor, WeightMap, check_covered


class _CopiesAreViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A copy keeps the geometry of what it was copied from, so that it tells where its elements came from."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0].view_as(args[0]) if func is torch.ops.aten.clone.default else func(*args, **kwargs or {})


def checkpoint_names(model: nn.Module) -> WeightMap:
    """`model`: a transformers PreTrainedModel on the meta device. Parameters that a checkpoint holds under their own
    name and shape are left out, and those whose conversion is no matter of views: a folder must hold them as they are.

    Raises ConfigError for a parameter that a checkpoint holds in pieces that cannot be read one by one.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # Transformers 4 converts nothing
        return {}
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


def owned_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters, tied ones once: by storage, since on the meta device they may be several objects."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        first.setdefault(parameter.untyped_storage()._cdata, name)
    return list(first.values())
