"""Checks whether a value matters that a model's own forward reads from a parameter outside of the parameter's layer.

Such a parameter is not there when the forward runs: a layer's proxy answers with NaN. Gemma 4 reads the embedding of
its pad for the places of images, of which a text has none. The check runs the forward on eight tokens and skips the
layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from megatrain_ray.engine.discovery.fake_answers import Answers
from megatrain_ray.engine.discovery.trial_forward import Trial, run_trial, tensors_in
from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass
from megatrain_ray.engine.layer_calls.layer_call import is_floating
from megatrain_ray.engine.layer_calls.proxied_model import ProxiedModel
from megatrain_ray.engine.model.structure import ModelFactory, ModelStructure, build_empty
from megatrain_ray.errors import ConfigError

TOKEN, COUNT = 3, 8  # an id that no model uses for an image


def check_outside_reads(factory: ModelFactory, structure: ModelStructure, readers: Mapping[str, str]) -> None:
    """Raise ConfigError if what is read reaches a layer, or the end of the base model's forward.

    Also if it is read elsewhere, or is a parameter of no layer.

    readers: path of the module that reads each parameter.
    """
    model = build_empty(factory, torch.float32)
    name = type(model).__name__
    held = {p.name for layer in structure.layers for p in layer.parameters}
    base = f"{structure.base}."
    for parameter, reader in readers.items():
        if parameter not in held or not f"{reader}.".startswith(base):
            raise _refusal(name, parameter, readers)
    with FakeTensorMode(), Answers():
        trial = run_trial(factory(torch.float32), torch.zeros(1, COUNT, dtype=torch.int64))
    proxied = ProxiedModel(model, structure, torch.device("cpu"))
    for value in filter(is_floating, _given(proxied, trial)):
        if value.isnan().any():
            raise _refusal(name, next(iter(readers)), readers)


def _refusal(model: str, parameter: str, readers: Mapping[str, str]) -> ConfigError:
    where = f"in {readers[parameter]}" if readers[parameter] else "by the model itself"
    return ConfigError(f"{model}: parameter {parameter} belongs to no layer: it is read {where}; not supported yet")


def _given(proxied: ProxiedModel, trial: Trial) -> Iterator[torch.Tensor]:
    """Yield what layers are given, and the result, in a forward in which each layer returns zeros."""
    ids = torch.full((1, COUNT), TOKEN)
    forward_pass = ForwardPass(lambda: proxied.forward(ids))
    forward_pass.start()
    while (call := forward_pass.pending) is not None:
        yield from tensors_in(call.arguments)
        forward_pass.answer(tree_map(_zeros, trial.first[call.path].output))  # the trial ran the same forward
    yield from tensors_in(vars(forward_pass.result))


def _zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
