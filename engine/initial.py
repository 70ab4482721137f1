"""Random initial values of one parameter, without materialising the model around it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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
    surroundings = _own_surroundings(model, path)
    module, _ = surroundings[-1]
    for key, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[key] = nn.Parameter(torch.full(parameter.shape, math.nan), requires_grad=False)
    with torch.no_grad(), _OwnRandomNumbers(module_seed(path, seed)):
        for around, initialiser in reversed(surroundings):
            initialiser._init_weights(around)  # type: ignore[operator]  # of every PreTrainedModel
    values = module.get_parameter(local).detach()
    if math.isnan(values.sum().item()):
        raise ConfigError(
            f"{type(model).__name__} does not initialise {name} (a {type(module).__name__}) by itself: start from "
            "weights, with model.path instead of model.config"
        )
    return values


def _own_surroundings(model: nn.Module, path: str) -> list[tuple[nn.Module, nn.Module]]:
    """Copies of the modules from the model down to the one at `path`, each with the PreTrainedModel that initialises
    it. They are without the marks of an initialisation that meta tensors have been through, and hold each other in the
    place of the originals, which other threads read meanwhile."""
    module = initialiser = _copy(model)
    found = [(module, initialiser)]
    for part in path.split(".") if path else ():
        child = _copy(module.get_submodule(part))
        module._modules[part] = child
        module = child
        if hasattr(module, "_init_weights"):
            initialiser = module
        found.append((module, initialiser))
    return found


def _copy(module: nn.Module) -> nn.Module:
    """With the same parameters and submodules, which may be replaced."""
    own = type(module).__new__(type(module))
    own.__dict__ |= module.__dict__
    own.__dict__ |= {"_parameters": dict(module._parameters), "_modules": dict(module._modules)}
    own.__dict__.pop("_is_hf_initialized", None)
    return own


class _OwnRandomNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """This thread's random operations on the CPU draw what they would from torch's own generator with the seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        on_cpu = all(arg.device.type == "cpu" for arg in args if isinstance(arg, torch.Tensor))
        if on_cpu and torch.Tag.nondeterministic_seeded in func.tags:
            if not any(argument.name == "generator" for argument in func._schema.arguments):
                func = _with_generator(func)
            kwargs["generator"] = self._generator
        return func(*args, **kwargs)


def _with_generator(func: Any) -> Any:
    """The overload of a random operation that takes a generator too. Raises ConfigError where there is none."""
    packet, name = func.overloadpacket, func._overloadname
    wanted = "generator" if name == "default" else f"{name}_generator"
    if wanted not in packet.overloads():
        raise ConfigError(f"a model's initialisation calls {func}, which draws from torch's own generator only")
    return getattr(packet, wanted)


def module_seed(path: str, seed: int) -> int:
    """Of a module's random values: 63 bits of a hash, the same on every machine and in every version of Python."""
    digest = hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
