"""Random initial values of one parameter, without materialising the model around it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatrain_ray.errors import ConfigError


def initial_values(model: nn.Module, name: str, seed: int) -> Tensor:
    """What the model's own initialisation gives parameter `name`, in its shape, fp32, on the CPU.

    `model`: a transformers PreTrainedModel on the meta device. Transformers initialises children before parents, and a
    parent may set parameters of its children (GPT-2's residual projections), so every module around the parameter has
    its turn. The values depend on (its configuration, seed, name) only: neither on the order of calls nor on the state
    of any random generator, which stay untouched. Raises ConfigError when the model leaves elements of the parameter
    unset.
    """
    path, _, local = name.rpartition(".")
    module = model.get_submodule(path)
    with _materialized(module), _unmarked(model, path), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(module_seed(path, seed))
        for around, initialiser in reversed(list(_surroundings(model, path))):
            initialiser._init_weights(around)  # type: ignore[operator]  # of every PreTrainedModel
        values = module.get_parameter(local).detach()
    if math.isnan(values.sum().item()):
        raise ConfigError(
            f"{type(model).__name__} does not initialise {name} (a {type(module).__name__}) by itself: start from "
            "weights, with model.path instead of model.config"
        )
    return values


def _surroundings(model: nn.Module, path: str) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The modules from the model down to the one at `path`, each with the PreTrainedModel that initialises it."""
    module = initialiser = model
    yield module, initialiser
    for part in path.split(".") if path else ():
        module = module.get_submodule(part)
        if hasattr(module, "_init_weights"):
            initialiser = module
        yield module, initialiser


@contextmanager
def _materialized(module: nn.Module) -> Iterator[None]:
    """The module's own parameters in FP32 on the CPU, every element NaN, for the time of the block."""
    before = dict(module._parameters)
    for name, parameter in before.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(torch.full(parameter.shape, math.nan), requires_grad=False)
    try:
        yield
    finally:
        module._parameters.update(before)


@contextmanager
def _unmarked(model: nn.Module, path: str) -> Iterator[None]:
    """Without the marks of an initialisation that meta tensors have been through."""
    marked = [m for m, _ in _surroundings(model, path) if vars(m).pop("_is_hf_initialized", False)]
    try:
        yield
    finally:
        for module in marked:
            module._is_hf_initialized = True  # type: ignore[assignment]


def module_seed(path: str, seed: int) -> int:
    """Of a module's random values: 63 bits of a hash, the same on every machine and in every version of Python."""
    digest = hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
