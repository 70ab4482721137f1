"""Adds LoRA to a model: a trained pair of thin matrices for each of some frozen matrices.

The formula is that of E. Hu et al., "LoRA: Low-rank adaptation of large language models", 2021:

    y = W x + alpha ÷ rank · B A dropout(x)        W [out, in]   A [rank, in]   B [out, rank]

The frozen matrix keeps its name, so that a checkpoint's names stay valid. The pair of MODULE is MODULE.lora_A.weight
and MODULE.lora_B.weight, as in peft's files.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain_ray.engine.layout.flat_layout import ParameterGroup
from megatrain_ray.engine.model.parameter_rules import ParameterRules, matching, near
from megatrain_ray.engine.model.structure import ModelFactory
from megatrain_ray.errors import ConfigError

A_END, B_END = ".lora_A.weight", ".lora_B.weight"
ADAPTERS = r"\.lora_[AB]\.weight$"


def is_adapter(name: str) -> bool:
    """Return whether a parameter of that name belongs to a LoRA pair."""
    return name.endswith((A_END, B_END))


def module_of(name: str) -> str:
    """Return the path of the module whose pair this adapter parameter belongs to."""
    return name.removesuffix(A_END).removesuffix(B_END)


@dataclass(frozen=True)
class Lora:
    """Says which matrices get a LoRA pair, and with which settings."""

    match: tuple[str, ...]  # patterns (`re.search`) for the paths of modules
    rank: int
    alpha: float
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def attach(self, model: nn.Module) -> None:
        """Add a pair to every linear module that matches. It gets no values: the model is on meta or fake tensors.

        Raises ConfigError for a pattern that matches no linear module, and for a matrix that cannot have a pair.
        """
        # One adapted class for each class, so that equal layers stay equal.
        kinds: dict[type[nn.Module], type[nn.Module]] = {}
        for path in self._targets(model):
            module = model.get_submodule(path)
            weight = module.get_parameter("weight")
            num_in, num_out = weight.shape if is_transposed(module) else weight.shape[::-1]
            like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
            kind = type(module)
            module.__class__ = kinds.setdefault(kind, type(f"Adapted{kind.__name__}", (_Adapted, kind), {}))
            module.scale = self.scale  # type: ignore[assignment]  # a plain attribute
            module.lora_dropout = nn.Dropout(self.dropout) if self.dropout else nn.Identity()
            module.lora_A = nn.Linear(num_in, self.rank, bias=False, **like)
            module.lora_B = nn.Linear(self.rank, num_out, bias=False, **like)

    def _targets(self, model: nn.Module) -> list[str]:
        paths = [path for path, _ in model.named_modules()]
        found = {pattern: matching("lora.match", pattern, paths) for pattern in self.match}
        matched = [(p, m) for p, m in model.named_modules() if any(p in names for names in found.values())]
        # Counted by storage, because on the meta device a shared parameter may be several objects.
        uses = Counter(p.untyped_storage()._cdata for _, p in model.named_parameters(remove_duplicate=False))
        for path, module in matched:
            if problem := self._problem(module, uses):
                raise ConfigError(f"lora.match: {path} {problem}; make the pattern narrower")
        linear = [path for path, module in model.named_modules() if _is_linear(module)]
        for pattern in self.match:
            if found[pattern].isdisjoint(linear):
                raise ConfigError(
                    f"lora.match: {pattern!r} matches no linear module of the model ({len(linear)} of them); "
                    f"{near(pattern, linear)}"
                )
        return [path for path, module in matched if _is_linear(module)]

    def _problem(self, module: nn.Module, uses: Counter[int]) -> str | None:
        """Return why a matching module cannot have a pair; None if it can, or if it holds no matrix and is skipped.

        uses: how many parameters of the model have each storage, by the storage's identity.
        """
        own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
        if not own:
            return None
        if not _is_linear(module):
            return f"is of class {type(module).__name__}: a pair stands beside the matrix of a linear module only"
        if any(uses[p.untyped_storage()._cdata] > 1 for p in own):
            return "shares its matrix with another module, and a pair would serve one of its two uses"
        if self.rank > min(own[0].shape):
            sides = " × ".join(map(str, own[0].shape))
            return f"is {sides}, and lora.rank is {self.rank}: set at most the smaller side"
        return None


@dataclass(frozen=True)
class AdaptedFactory:
    """Builds a model with `base` and adds the LoRA pairs to it. It is a ModelFactory."""

    base: ModelFactory
    lora: Lora

    def __call__(self, dtype: torch.dtype) -> nn.Module:
        model = self.base(dtype)
        self.lora.attach(model)
        return model


@dataclass(frozen=True)
class LoraRules(ParameterRules):
    """Trains the LoRA pairs, and besides them only the parameters that `trainable` matches."""

    def assign(self, model: nn.Module) -> dict[str, ParameterGroup]:
        """Return the group of each parameter, as ParameterRules.assign does.

        Raises ConfigError for a pair that is frozen, and for a trained parameter of a module that has a pair, or that
        contains a module with one: an adapter's file could not hold both.
        """
        groups = ParameterRules((ADAPTERS, *self.trainable), self.freeze, self.groups).assign(model)
        adapters = [name for name in groups if is_adapter(name)]
        # Modules with a pair, and those that contain them.
        parts = [module_of(name).split(".") for name in adapters]
        holders = {".".join(path[:depth]) for path in parts for depth in range(1, len(path) + 1)}
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
    """Adds a pair to the forward of a linear module. It precedes the module's class in the base classes."""

    scale: float
    lora_dropout: nn.Module
    lora_A: nn.Module  # noqa: N815  # peft's name
    lora_B: nn.Module  # noqa: N815

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(x)  # the linear module's own forward
        product: torch.Tensor = self.lora_B(self.lora_A(self.lora_dropout(x)))
        return result + product * self.scale


def is_transposed(module: nn.Module) -> bool:
    """Return whether the module is Transformers' Conv1D: a linear module whose matrix is [in, out]."""
    from transformers.pytorch_utils import Conv1D  # takes seconds to import; imported late so that errors come first

    return isinstance(module, Conv1D)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed(module)
