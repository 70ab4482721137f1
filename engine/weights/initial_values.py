"""Computes random initial values of parameters: what the model's own initialization gives them with a seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain_ray.errors import ConfigError

BLOCK_ELEMENTS = 1 << 20  # 4 MiB of FP32: larger blocks do not stay in the caches
GROUP_ELEMENTS = 16  # torch draws this many numbers together


def initial_values(model: nn.Module, name: str, seed: int) -> Tensor:
    """Return the values that the model's own initialization gives parameter `name`, in its shape, fp32, on the CPU.

    model: a transformers PreTrainedModel on the meta device.

    Transformers initializes children before parents, and a parent may set parameters of its children (GPT-2's residual
    projections). So every module around the parameter is initialized in turn.

    The values depend only on the model's configuration, `seed` and `name`. They depend neither on the order of calls
    nor on the state of any random generator, and no generator is changed.

    Raises ConfigError if the model leaves elements of the parameter unset.
    """
    path, _, local = name.rpartition(".")
    surroundings = _own_surroundings(model, path)
    module, _ = surroundings[-1]
    _replace_parameters(module, lambda shape: torch.full(shape, math.nan))
    _initialize(surroundings, module_seed(path, seed))
    values = module.get_parameter(local).detach()
    if math.isnan(values.sum().item()):
        raise ConfigError(
            f"{type(model).__name__} does not initialise {name} (a {type(module).__name__}) by itself: start from "
            "weights, with model.path instead of model.config"
        )
    return values


@dataclass(frozen=True)
class Normal:
    """Describes a tensor of `numel` elements that is filled with normal random numbers in one call."""

    numel: int
    mean: float
    std: float

    def blocks(self, generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
        """Yield what one call would draw, block by block: the block's first element, and its values.

        The next block overwrites the values. The blocks equal a single call, since torch draws groups of numbers one
        after the other. For an incomplete group at the end, torch draws the last numbers again, as many as a group has.
        So the last block has at least the size of a group.
        """
        memory = torch.empty(min(self.numel, BLOCK_ELEMENTS + GROUP_ELEMENTS))
        starts = range(0, max(1, self.numel - GROUP_ELEMENTS + 1), BLOCK_ELEMENTS)
        for start in starts:
            size = BLOCK_ELEMENTS if start < starts[-1] else self.numel - start
            yield start, memory[:size].normal_(self.mean, self.std, generator=generator)


@dataclass(frozen=True)
class Constant:
    """Describes a tensor of `numel` elements that are all `value`."""

    numel: int
    value: float

    def blocks(self, generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
        """Yield the values as `Normal.blocks` does. Nothing is drawn from `generator`."""
        memory = torch.full((min(self.numel, BLOCK_ELEMENTS),), self.value)
        for start in range(0, max(1, self.numel), BLOCK_ELEMENTS):
            yield start, memory[: self.numel - start]


Fill = Normal | Constant


def fills_of(model: nn.Module) -> dict[str, tuple[Fill, ...]]:
    """Return `fills_up_to` of every parameter, or nothing unless all are known. `model`: as for `initial_values`."""
    found: dict[str, tuple[Fill, ...]] = {}
    for name, _ in model.named_parameters():
        if (fills := fills_up_to(model, name)) is None:
            return {}
        found[name] = fills
    return found


def fills_up_to(model: nn.Module, name: str) -> tuple[Fill, ...] | None:
    """Return what a module draws until it has set its parameter `name`, and as the last entry what it sets that to.

    Return None unless the module draws normal numbers only, and sets the whole parameter once, to such numbers or to a
    constant.

    model: as for `initial_values`.
    """
    path, _, local = name.rpartition(".")
    surroundings = _own_surroundings(model, path)
    module, _ = surroundings[-1]
    _replace_parameters(module, lambda shape: torch.empty(shape, device="meta"))
    noted = _Noted(module.get_parameter(local))
    try:
        with noted:
            _initialize(surroundings, 0)
    except Exception:  # the initialization reads values, which meta tensors do not have
        return None
    return noted.fills(module.get_parameter(local))


def _replace_parameters(module: nn.Module, make: Callable[[torch.Size], Tensor]) -> None:
    for key, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[key] = nn.Parameter(make(parameter.shape), requires_grad=False)


def _initialize(surroundings: Sequence[tuple[nn.Module, nn.Module]], seed: int) -> None:
    with torch.no_grad(), _OwnRandomNumbers(seed):
        for around, initialiser in reversed(surroundings):
            initialiser._init_weights(around)  # type: ignore[operator]  # every PreTrainedModel has it


def _own_surroundings(model: nn.Module, path: str) -> list[tuple[nn.Module, nn.Module]]:
    """Return copies of the modules from the model down to the one at `path`, each with its initializer.

    The initializer is the PreTrainedModel that initializes the module. The copies lack the marks that an initialization
    of meta tensors leaves. They contain each other in place of the originals, which other threads read at the same
    time.
    """
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
    own = type(module).__new__(type(module))
    own.__dict__ |= module.__dict__
    own.__dict__ |= {"_parameters": dict(module._parameters), "_modules": dict(module._modules)}
    own.__dict__.pop("_is_hf_initialized", None)
    return own


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is drawn up to a parameter (on the meta device), and whether that is all that sets it."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._target = target
        self._storage = target.untyped_storage()
        self._fills: list[Fill] = []
        self._is_complete = False
        self._is_other = False  # whether something else happened, which `Fill` cannot describe

    def fills(self, parameter: Tensor) -> tuple[Fill, ...] | None:
        """Return what was drawn and set up to the parameter, given as initialized; None if anything else set it."""
        is_all = self._is_complete and not self._is_other and parameter is self._target and self._is_own(parameter)
        return tuple(self._fills) if is_all else None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        sets = func._schema.is_mutable and any(map(self._is_own, tree_leaves((args, kwargs))))
        draws = not self._is_complete and torch.Tag.nondeterministic_seeded in func.tags
        fill = _as_fill(func, args, kwargs or {})
        self._is_other |= (draws or sets) and (fill is None or self._is_complete)
        if fill is not None and (draws or sets):
            needed = [] if isinstance(fill, Constant) else self._fills
            self._fills = [*needed, fill]
            self._is_complete = sets
            self._is_other |= sets and fill.numel != self._target.numel()
        return func(*args, **kwargs or {})

    def _is_own(self, value: object) -> bool:
        """Return whether `value` uses the memory that the parameter began with."""
        return isinstance(value, Tensor) and value.untyped_storage()._cdata == self._storage._cdata


def _as_fill(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Fill | None:
    """Return what an operation fills a tensor with if that is normal random numbers or a constant, else None.

    The tensor must be on the meta device, FP32, and contiguous, so that numbers are drawn in the order of its memory.
    """
    aten = torch.ops.aten
    is_fill = func in (aten.normal_.default, aten.fill_.Scalar, aten.zero_.default)
    if not is_fill or any(value is not None for value in kwargs.values()):
        return None
    tensor, *numbers = args
    if not (tensor.is_meta and tensor.dtype == torch.float32 and tensor.is_contiguous()):
        return None
    if func is not aten.normal_.default:
        return Constant(tensor.numel(), *(numbers or (0.0,)))
    mean, std = numbers[0] if numbers else 0.0, numbers[1] if len(numbers) > 1 else 1.0
    return Normal(tensor.numel(), mean, std)


class _OwnRandomNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes this thread's random operations on the CPU draw what torch's own generator would draw with `seed`."""

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
    """Return the overload of a random operation that also takes a generator. Raises ConfigError if there is none."""
    packet, name = func.overloadpacket, func._overloadname
    wanted = "generator" if name == "default" else f"{name}_generator"
    if wanted not in packet.overloads():
        raise ConfigError(f"a model's initialisation calls {func}, which draws from torch's own generator only")
    return getattr(packet, wanted)


def module_seed(path: str, seed: int) -> int:
    """Return the seed of a module's random values: 63 bits of a hash that is the same everywhere."""
    digest = hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
