"""Selects which parameters are trained, and how: by patterns over their names, and those that Muon trains by shape.

A pattern is a regular expression that may match anywhere in a name (`re.search`). A shared parameter has several names;
one that matches is enough. A range of experts is matched by the name of the whole stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from difflib import get_close_matches

from torch import nn
from torch.nn.modules.conv import _ConvNd

from megatrain_ray.engine.layout.expert_names import whole_name
from megatrain_ray.engine.layout.flat_layout import COMMON, FROZEN, ParameterGroup, ParameterSpec
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.errors import ConfigError
from megatrain_ray.time_limit import OutOfTimeError, time_limit

MUON_DIMENSIONS = (2, 3)  # of a matrix; of a stack of matrices, one per expert
PATTERN_S = 10.0  # a pattern that ends takes milliseconds
NEAR = 0.4  # cutoff of difflib's ratio; low, since even the intended name is not very similar to a pattern


Found = Mapping[str, Set[str]]  # names that match a pattern, by pattern


@dataclass(frozen=True)
class GroupRule:
    """Assigns a group to the parameters that one of the patterns matches."""

    match: tuple[str, ...]
    group: ParameterGroup


@dataclass(frozen=True)
class ParameterRules:
    """Holds the patterns of a run."""

    trainable: tuple[str, ...] = ()  # parameters that match none of these are frozen; empty: all may be trained
    freeze: tuple[str, ...] = ()  # parameters that match one of these are frozen
    groups: tuple[GroupRule, ...] = ()  # the first rule that matches a parameter applies
    muon: bool = False  # whether Muon trains the matrices of blocks, unless a group says otherwise

    def assign(self, model: nn.Module) -> dict[str, ParameterGroup]:
        """Return the group of each parameter of the model, by each of the parameter's names.

        Parameters that the model itself has frozen (`requires_grad` false) stay frozen.

        Raises ConfigError for a pattern that matches nothing, for a group that no trained parameter gets, and if
        nothing is left to train.
        """
        aliases = _aliases(model)
        every = {whole_name(name) for names in aliases.values() for name in names}
        found = {pattern: matching(key, pattern, every) for key, pattern in self._patterns()}
        for key, pattern in self._patterns():
            if not found[pattern]:
                raise ConfigError(
                    f"{key}: {pattern!r} matches no parameter of the model ({len(aliases)} of them); "
                    f"{near(pattern, list(map(whole_name, aliases)))}"
                )
        trained = [
            name
            for name, names in aliases.items()
            if model.get_parameter(name).requires_grad
            and (not self.trainable or _matches(self.trainable, names, found))
            and not _matches(self.freeze, names, found)
        ]
        if not trained:
            raise ConfigError("train.trainable and train.freeze leave no parameter to train; freeze less")
        groups = {name: self._group(aliases[name], found) for name in trained}
        used = {id(group) for group in groups.values()}
        for number, rule in enumerate(self.groups):
            if id(rule.group) not in used:
                raise ConfigError(
                    f"train.groups.{number}: every parameter that it matches is frozen or in an earlier group; leave "
                    "it out, or put it before the others"
                )
        return {alias: groups.get(name, FROZEN) for name, names in aliases.items() for alias in names}

    def _patterns(self) -> Iterator[tuple[str, str]]:
        yield from (("train.trainable", pattern) for pattern in self.trainable)
        yield from (("train.freeze", pattern) for pattern in self.freeze)
        for number, rule in enumerate(self.groups):
            yield from ((f"train.groups.{number}.match", pattern) for pattern in rule.match)

    def _group(self, names: Sequence[str], found: Found) -> ParameterGroup:
        return next((rule.group for rule in self.groups if _matches(rule.match, names, found)), COMMON)


ALL_ALIKE = ParameterRules()


def decays(model: nn.Module, name: str) -> bool:
    """Return whether weight decay applies to a parameter: to matrices, but neither to norms nor to biases.

    Those mostly have one dimension. Norms of single heads (Cohere) and biases of stacked experts (GPT-OSS) have two.
    """
    path, _, local = name.rpartition(".")
    module = model.get_submodule(path)
    kind = type(module).__name__.lower()
    is_table = isinstance(module, nn.Embedding) or kind.endswith("head")  # Inkling's and Baichuan 2's have norms
    is_norm = "norm" in kind and not is_table
    return model.get_parameter(name).dim() > 1 and not is_norm and not local.endswith("bias")


def with_muon(structure: ModelStructure, model: nn.Module) -> ModelStructure:
    """Return the structure with those parameters marked that Muon trains.

    Raises ConfigError if a group gives Muon a parameter of other than 2 or 3 dimensions, or if nothing is left for it.
    """
    layers = []
    for layer in structure.layers:
        in_block = layer.kind is LayerKind.BLOCK
        marked = (replace(p, muon=_is_for_muon(p, structure, model, in_block=in_block)) for p in layer.parameters)
        layers.append(replace(layer, parameters=tuple(marked)))
    if not any(p.muon for layer in layers for p in layer.parameters):
        raise ConfigError(
            "train.optimizer: muon has no matrix of the model's layers to train: they are frozen, or left to AdamW by "
            "train.groups; set adamw"
        )
    return replace(structure, layers=tuple(layers))


def _is_for_muon(p: ParameterSpec, structure: ModelStructure, model: nn.Module, *, in_block: bool) -> bool:
    if not p.group.trained or p.tied_to:
        return False
    if p.group.muon and len(p.shape) not in MUON_DIMENSIONS:
        raise ConfigError(
            f"train.groups: optimizer: muon is for matrices and stacks of them, and {p.name} has {len(p.shape)} "
            "dimensions; match less, or leave it to adamw"
        )
    if p.group.muon is not None:
        return p.group.muon
    # Neither tables whose rows are looked up, nor convolutions, nor what does not decay count as matrices.
    is_table = p.name in structure.looked_up or isinstance(model.get_submodule(p.name.rpartition(".")[0]), _ConvNd)
    return in_block and len(p.shape) in MUON_DIMENSIONS and not is_table and p.decay


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, by its first name, in the order of `model.parameters()`."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return aliases


def matching(key: str, pattern: str, names: Iterable[str]) -> frozenset[str]:
    """Return the names that a pattern of the setting `key` matches.

    Raises ConfigError if that takes too long: some patterns take a time that doubles with each letter of a name.
    """
    try:
        with time_limit(PATTERN_S):
            return frozenset(name for name in names if re.search(pattern, name))
    except OutOfTimeError:
        raise ConfigError(
            f"{key}: {pattern!r} was not compared with the model's names within {PATTERN_S:.0f} s; write it without "
            "repetitions inside of repetitions, such as (a+)+"
        ) from None


def _matches(patterns: Iterable[str], names: Sequence[str], found: Found) -> bool:
    return any(whole_name(name) in found[pattern] for pattern in patterns for name in names)


def near(pattern: str, names: Sequence[str]) -> str:
    """Return a hint at what a pattern that matches none of `names` may have meant, for an error message."""
    candidates: dict[str, None] = {}  # names, their beginnings (a layer) and ends (the same matrix of every layer)
    for name in names:
        parts = name.split(".")
        for cut in range(len(parts)):
            candidates[".".join(parts[cut:])] = candidates[".".join(parts[: cut + 1])] = None
    close = get_close_matches(re.sub(r"\\|\W+$|^\W+", "", pattern), candidates, n=3, cutoff=NEAR)
    return f"near it are {', '.join(close)}" if close else f"the first are {', '.join(names[:3])}"
