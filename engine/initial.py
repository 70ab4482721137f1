"""Random initial values of one parameter, without materialising the model around it."""

from __future__ import annotations

import copy
import hashlib
import math

import torch
from torch import Tensor, nn

from megatrain_ray.errors import ConfigError


def initial_values(model: nn.Module, name: str, seed: int) -> Tensor:
    """What the model's own initialisation gives parameter `name`, in its shape, fp32, on the CPU.

    `model`: a transformers PreTrainedModel on the meta device. The values depend on (its configuration, seed, name)
    only: neither on the order of calls nor on the state of any random generator, which stay untouched. Raises
    ConfigError when the model leaves elements of the parameter unset.
    """
    path, _, local = name.rpartition(".")
    module = _materialized(model.get_submodule(path))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_module_seed(path, seed))
        model._init_weights(module)  # type: ignore[operator]  # of every PreTrainedModel: sets one module's own values
    values = module.get_parameter(local).detach()
    if math.isnan(values.sum().item()):
        raise ConfigError(
            f"{type(model).__name__} does not initialise {name} (a {type(module).__name__}) by itself: start from "
            "weights, with model.path instead of model.config"
        )
    return values


def _materialized(module: nn.Module) -> nn.Module:
    """A copy in FP32 on the CPU with every parameter NaN, without the marks of an initialisation that meta tensors
    have been through."""
    module = copy.deepcopy(module).float().to_empty(device="cpu")
    for part in (*module.modules(), *module.parameters()):
        vars(part).pop("_is_hf_initialized", None)
    for parameter in module.parameters():
        parameter.data.fill_(math.nan)
    return module


def _module_seed(path: str, seed: int) -> int:
    """63 bits of a hash that is the same on every machine and in every version of Python."""
    digest = hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
