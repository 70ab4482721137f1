"""Provides templates: modules without weights, one for each layer structure, bound to views of arriving layers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

# Attributes that tell a module which of several equal layers it is. They are set for each call, since a forward may
# use them.
POSITION_ATTRIBUTES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})

Positions = Sequence[tuple[dict[str, object], str, object]]  # attribute dict of a module in a template, name, value


class Template:
    """Wraps a module on the meta device whose parameters are replaced for the duration of a call."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        """Wrap `module`, whose parameters have these `names`. `bound` takes them in this order.

        Other names that the module has for one of them (the decoder's bias in the head of BERT) are bound with it.
        """
        self.module = module
        self.names = tuple(names)
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    places.setdefault(_storage(parameter), []).append((part, name))
        self._places = [places[_storage(module.get_parameter(name))] for name in names]

    def positions_of(self, module: nn.Module) -> Positions:
        """Return the position attributes of `module`, which has the template's structure, and of its submodules."""
        return [
            (vars(self.module.get_submodule(path)), name, vars(part)[name])
            for path, part in module.named_modules()
            for name in sorted(POSITION_ATTRIBUTES & vars(part).keys())
        ]

    @contextmanager
    def bound(self, parameters: Sequence[torch.Tensor], positions: Positions = ()) -> Iterator[Callable[..., Any]]:
        """Yield the module with `parameters` bound to it and its position attributes set as in `positions`."""
        before = [places[0][0]._parameters[places[0][1]] for places in self._places]
        self._bind(parameters)
        for attributes, name, value in positions:
            attributes[name] = value
        try:
            yield self.module
        finally:
            self._bind(before)

    def _bind(self, parameters: Sequence[torch.Tensor | None]) -> None:
        for places, parameter in zip(self._places, parameters, strict=True):
            for owner, name in places:
                owner._parameters[name] = cast(nn.Parameter, parameter)  # a plain tensor: it must stay a view


def _storage(parameter: torch.Tensor) -> int:
    """Return the identity of the parameter's storage, since on the meta device a tied one may be several objects."""
    key: int = parameter.untyped_storage()._cdata
    return key


def structure(module: nn.Module) -> object:
    """Return a hashable description of all that a module's forward may depend on, except its weights and its position.

    Two modules of equal structure compute the same function of their parameters. Objects that cannot be described (a
    lambda, an open file) are described by identity, so that such modules are never considered equal.
    """
    own = {k: v for k, v in vars(module).items() if k not in _MODULE_INTERNALS and k not in POSITION_ATTRIBUTES}
    return (
        type(module),
        tuple((name, tuple(p.shape), p.dtype) for name, p in module._parameters.items() if p is not None),
        tuple((name, _describe(b)) for name, b in module._buffers.items()),
        _describe(own),
        _describe([*module._forward_pre_hooks.values(), *module._forward_hooks.values()]),
        tuple((name, structure(child)) for name, child in module.named_children()),
    )


_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}


def _describe(value: object) -> object:
    if value is None or isinstance(value, str | int | float | bool | type | torch.dtype | torch.device):
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype, _digest(value))
    if isinstance(value, Mapping):
        return ("mapping", tuple((str(k), _describe(v)) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return (type(value), tuple(_describe(v) for v in value))
    if isinstance(value, partial):
        return (partial, _describe(value.func), _describe(value.args), _describe(value.keywords))
    return (type(value), id(value))


def _digest(tensor: torch.Tensor) -> bytes:
    if isinstance(tensor, FakeTensor):
        return b""  # it has no values
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw).digest()
