"""Checks whether a model keeps several documents in one row apart.

Given positions that restart, a Transformers model either builds masks from them or does not. The arguments of its
layers show which. The check runs on eight tokens and skips the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from megatrain_ray.engine.discovery.trial_forward import Answers, Trial, run_trial
from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass
from megatrain_ray.engine.layer_calls.layer_call import LayerCall
from megatrain_ray.engine.layer_calls.proxied_model import ProxiedModel
from megatrain_ray.engine.model.structure import LayerKind, ModelFactory, ModelStructure, build_empty
from megatrain_ray.errors import ConfigError

POSITIONS = (0, 1, 2, 0, 1, 0, 1, 2)  # three documents


def check_packing(factory: ModelFactory, structure: ModelStructure) -> None:
    """Raise ConfigError unless every block receives a mask that keeps documents apart.

    Also raised for a block with a convolution along the tokens, which ignores masks (layers with a recurrent state).
    """
    layers = {path: layer for layer in structure.layers if layer.kind is LayerKind.BLOCK for path in layer.modules}
    proxied = ProxiedModel(build_empty(factory, torch.float32), structure, torch.device("cpu"))
    keep_apart: dict[str, bool] = {}  # blocks, by path
    with FakeTensorMode(), Answers():
        trial = run_trial(factory(torch.float32), torch.zeros(1, len(POSITIONS), dtype=torch.int64))
    for call in _calls(proxied, trial):
        if call.path not in layers:
            continue
        part = layers[call.path].part
        block = part.block if part else call.path
        keep_apart[block] = any(map(_keeps_apart, call.arguments)) or keep_apart.get(block, False)
        if any(isinstance(inner, nn.Conv1d) for inner in proxied.modules[call.path].modules()):
            raise _refusal(f"{block} of this model hands a state from token to token, across documents")
    for block, keeps in keep_apart.items():
        if not keeps:
            raise _refusal(f"{block} of this model is given no mask that keeps the documents of a row apart")


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"data.packing: true: {reason}; set data.packing: false, which cuts each document alone")


def _calls(proxied: ProxiedModel, trial: Trial) -> Iterator[LayerCall]:
    """Yield the layer calls of a forward in which each layer returns zeros."""
    positions = torch.tensor([POSITIONS])
    forward_pass = ForwardPass(lambda: proxied.forward(torch.zeros_like(positions), positions))
    forward_pass.start()
    while (call := forward_pass.pending) is not None:
        yield call
        forward_pass.answer(tree_map(_zeros, trial.first[call.path].output))  # the trial ran the same forward


def _zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _keeps_apart(value: Any) -> bool:
    """Return whether `value` is a mask that allows no attention from one document to another.

    A mask is [.., T, T]: booleans of what may attend, or numbers that are added to scores.
    """
    size = len(POSITIONS)
    if not isinstance(value, torch.Tensor) or value.shape[-2:] != (size, size):
        return False
    attends = value if value.dtype is torch.bool else value > torch.finfo(value.dtype).min / 2
    documents = (torch.tensor(POSITIONS) == 0).cumsum(0)
    across = documents[:, None] != documents[None, :]
    return not bool((attends & across).any()) and bool(attends.diagonal(dim1=-2, dim2=-1).all())
