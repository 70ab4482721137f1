"""Which parameters are trained, and how: patterns over the model's parameter names.

A pattern is a regular expression that may match anywhere in a name (`re.search`). A parameter that is shared has
several names; one that matches is enough. A range of experts goes by the name of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from megatrain_ray.engine.layout.expert_names import whole_name
from megatrain_ray.engine.layout.parameter_group import COMMON, FROZEN, ParameterGroup
from megatrain_ray.errors import ConfigError

NEAR = 0.4  # of difflib's ratio: a pattern is no name, so that even the right one is not very like it


@dataclass(frozen=True)
class GroupRule:
    """What the parameters that one of the patterns matches have of their own."""

    match: tuple[str, ...]
    group: ParameterGroup


@dataclass(frozen=True)
class ParameterRules:
    """The patterns of a run. `trainable`: what none of these matches is frozen; empty: everything may be trained.
    `freeze`: what one of these matches is frozen. `groups`: of those that match a parameter the first one counts.
    `muon`: Muon trains the matrices of blocks, unless a group says otherwise."""

    trainable: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    groups: tuple[GroupRule, ...] = ()
    muon: bool = False

    def assign(self, model: nn.Module) -> dict[str, ParameterGroup]:
        """The group of each parameter of the model, by all of its names. What the model itself has frozen
        (`requires_grad` false) stays so.

        Raises ConfigError for a pattern that matches nothing, a group that no trained parameter gets, and when nothing
        is left to train.
        """
        aliases = _aliases(model)
        for key, pattern in self._patterns():
            if not any(_matches([pattern], names) for names in aliases.values()):
                raise ConfigError(
                    f"{key}: {pattern!r} matches no parameter of the model ({len(aliases)} of them); "
                    f"{near(pattern, list(map(whole_name, aliases)))}"
                )
        trained = [name for name in aliases if model.get_parameter(name).requires_grad]
        open_to_all = not self.trainable
        trained = [name for name in trained if open_to_all or _matches(self.trainable, aliases[name])]
        trained = [name for name in trained if not _matches(self.freeze, aliases[name])]
        if not trained:
            raise ConfigError("train.trainable and train.freeze leave no parameter to train; freeze less")
        groups = {name: self._group(aliases[name]) for name in trained}
        self._check_used(groups.values())
        return {alias: groups.get(name, FROZEN) for name, names in aliases.items() for alias in names}

    def _patterns(self) -> Iterator[tuple[str, str]]:
        """Each with the key it stands under."""
        yield from (("train.trainable", pattern) for pattern in self.trainable)
        yield from (("train.freeze", pattern) for pattern in self.freeze)
        for number, rule in enumerate(self.groups):
            yield from ((f"train.groups.{number}.match", pattern) for pattern in rule.match)

    def _group(self, names: Sequence[str]) -> ParameterGroup:
        return next((rule.group for rule in self.groups if _matches(rule.match, names)), COMMON)

    def _check_used(self, groups: Iterable[ParameterGroup]) -> None:
        used = {id(group) for group in groups}
        for number, rule in enumerate(self.groups):
            if id(rule.group) not in used:
                raise ConfigError(
                    f"train.groups.{number}: every parameter that it matches is frozen or in an earlier group; leave "
                    "it out, or put it before the others"
                )


ALL_ALIKE = ParameterRules()


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter by its first one, in the order of `model.parameters()`."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return aliases


def _matches(patterns: Iterable[str], names: Sequence[str]) -> bool:
    return any(re.search(pattern, whole_name(name)) for pattern in patterns for name in names)


def near(pattern: str, names: Sequence[str]) -> str:
    """What a pattern that matches none of `names` may have meant."""
    close = get_close_matches(re.sub(r"\\|\W+$|^\W+", "", pattern), _wholes_and_parts(names), n=3, cutoff=NEAR)
    return f"near it are {', '.join(close)}" if close else f"the first are {', '.join(names[:3])}"


def _wholes_and_parts(names: Sequence[str]) -> Mapping[str, None]:
    """Names, their beginnings (a layer) and their ends (the same matrix of every layer), each once."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for cut in range(len(parts)):
            found[".".join(parts[cut:])] = found[".".join(parts[: cut + 1])] = None
    return found
