"""LoRA: a trained pair of thin matrices beside each of some frozen ones (E. Hu et al., "LoRA: Low-rank adaptation of
large language models", 2021).

    y = W x + alpha ÷ rank · B A dropout(x)        W [out, in]   A [rank, in]   B [out, rank]

The matrix keeps its name, so that a checkpoint's names stay the model's; the pair of MODULE is MODULE.lora_A.weight and
MODULE.lora_B.weight, as in peft's files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain_ray.engine.layout.parameter_group import ParameterGroup
from megatrain_ray.engine.model.parameter_rules import ParameterRules, near
from megatrain_ray.engine.model.structure import ModelFactory
from megatrain_ray.errors import ConfigError

A_END, B_END = ".lora_A.weight", ".lora_B.weight"
ADAPTERS = r"\.lora_[AB]\.weight$"


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to a pair."""
    return name.endswith((A_END, B_END))


def module_of(name: str) -> str:
    """Path of the module whose pair the adapter belongs to."""
    return name.removesuffix(A_END).removesuffix(B_END)


@dataclass(frozen=True)
class Lora:
    """Which matrices have a pair, and what it is like. `match`: patterns (`re.search`) over the paths of modules."""

    match: tuple[str, ...]
    rank: int
    alpha: float
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def attach(self, model: nn.Module) -> None:
        """Gives every linear module that matches its pair, without values: the model is on meta or fake tensors.

        Raises ConfigError for a pattern that matches no linear module, and for a matrix that cannot have a pair.
        """
        kinds: dict[type[nn.Module], type[nn.Module]] = {}  # one class a class: equal layers must stay equal
        for path in self._targets(model):
            module = model.get_submodule(path)
            num_in, num_out = _sides(module)
            like: dict[str, Any] = {"device": module.weight.device, "dtype": module.weight.dtype}
            kind = type(module)
            module.__class__ = kinds.setdefault(kind, type(f"Adapted{kind.__name__}", (_Adapted, kind), {}))
            module.scale = self.scale  # type: ignore[assignment]  # a plain attribute
            module.lora_dropout = nn.Dropout(self.dropout) if self.dropout else nn.Identity()
            module.lora_A = nn.Linear(num_in, self.rank, bias=False, **like)
            module.lora_B = nn.Linear(self.rank, num_out, bias=False, **like)

    def _targets(self, model: nn.Module) -> list[str]:
        matched = [(p, m) for p, m in model.named_modules() if any(re.search(pattern, p) for pattern in self.match)]
        # By storage: on the meta device a shared parameter may be several objects.
        uses = Counter(p.untyped_storage()._cdata for _, p in model.named_parameters(remove_duplicate=False))
        for path, module in matched:
            if problem := self._problem(module, uses):
                raise ConfigError(f"lora.match: {path} {problem}; make the pattern narrower")
        linear = [path for path, module in model.named_modules() if _is_linear(module)]
        for pattern in self.match:
            if not any(re.search(pattern, path) for path in linear):
                raise ConfigError(
                    f"lora.match: {pattern!r} matches no linear module of the model ({len(linear)} of them); "
                    f"{near(pattern, linear)}"
                )
        return [path for path, module in matched if _is_linear(module)]

    def _problem(self, module: nn.Module, uses: Counter[int]) -> str | None:
        """Why a module that matches can have no pair; None also where it holds no matrix, as a norm, and is passed."""
        own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
        if own and not _is_linear(module):
            return f"is of class {type(module).__name__}: a pair stands beside the matrix of a linear module only"
        if any(uses[p.untyped_storage()._cdata] > 1 for p in own):
            return "shares its matrix with another module, and a pair would serve one of its two uses"
        if own and self.rank > min(own[0].shape):
            return (
                f"is {' × '.join(map(str, own[0].shape))}, and lora.rank is {self.rank}: set at most the smaller side"
            )
        return None


@dataclass(frozen=True)
class AdaptedFactory:
    """A ModelFactory: that of a base, with pairs."""

    base: ModelFactory
    lora: Lora

    def __call__(self, dtype: torch.dtype) -> nn.Module:
        model = self.base(dtype)
        self.lora.attach(model)
        return model


@dataclass(frozen=True)
class LoraRules(ParameterRules):
    """What is trained are the pairs, and beside them what `trainable` matches."""

    def assign(self, model: nn.Module) -> dict[str, ParameterGroup]:
        """As ParameterRules.assign. Raises ConfigError for a pair that is frozen, and for a trained parameter of a
        module that has one, or holds one that has: an adapter's file could not hold both."""
        groups = ParameterRules((ADAPTERS, *self.trainable), self.freeze, self.groups).assign(model)
        adapters = [name for name in groups if is_adapter(name)]
        holders = {path for name in adapters for path in _and_around(module_of(name))}
        for name, group in groups.items():
            if is_adapter(name) and not group.trained:
                raise ConfigError(
                    f"train.freeze matches {name}: an adapter that is not trained adds nothing; freeze less, or make "
                    "lora.match narrower"
                )
            if group.trained and not is_adapter(name) and name.rpartition(".")[0] in holders:
                raise ConfigError(
                    f"train.trainable matches {name}, whose module has an adapter; leave out one of the two"
                )
        return groups


class _Adapted(nn.Module):
    """The forward of a linear module with a pair; comes before its class."""

    scale: float
    lora_dropout: nn.Module
    lora_A: nn.Module  # noqa: N815  # peft's name
    lora_B: nn.Module  # noqa: N815

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(x)  # of the linear module
        product: torch.Tensor = self.lora_B(self.lora_A(self.lora_dropout(x)))
        return result + product * self.scale


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether it is Transformers' Conv1D: a linear module whose matrix is [in, out]."""
    from transformers.pytorch_utils import Conv1D  # seconds of imports; errors come first

    return isinstance(module, Conv1D)


def _sides(module: nn.Module) -> tuple[int, int]:
    """Numbers of inputs and outputs."""
    rows, columns = module.get_parameter("weight").shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


def _and_around(path: str) -> Iterator[str]:
    """The module and those that hold it."""
    while path:
        yield path
        path = path.rpartition(".")[0]
