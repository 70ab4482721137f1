"""What the tables of other tools' keys are made of, and how a table is applied to a file.

A table says of each key what it sets here, or why it sets nothing. Keys whose meaning depends on others set a value
that is no setting of ours (`epochs`, `warmup_ratio`), which convert_config.py resolves at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

# Values of a key that cannot be honoured with which it asks for nothing.
HARMLESS: tuple[Any, ...] = (False, 0, "", [], {}, "none", "null")


class RefusedError(Exception):
    """A value that cannot be honoured; the message says why."""


def same(value: Any) -> Any:
    return value


def number(value: Any) -> float:
    """Raises RefusedError. YAML 1.1 and quotes make texts of numbers; both tools take them."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RefusedError("expected a number") from None


def whole(value: Any) -> int:
    """Raises RefusedError."""
    if (found := number(value)) != int(found):
        raise RefusedError("expected an integer")
    return int(found)


def or_null(value: Any) -> float | None:
    """0 as null: off."""
    return number(value) or None


def negated(value: Any) -> bool:
    return not value


def names(value: Any) -> list[str]:
    """Of a list, or of a text with commas."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)


def one_of(choices: Mapping[str, Any], why: str) -> Callable[[Any], Any]:
    """The value of a choice; RefusedError with `why` for others."""

    def choose(value: Any) -> Any:
        if str(value) not in choices:
            raise RefusedError(why)
        return choices[str(value)]

    return choose


@dataclass(frozen=True)
class Sets:
    """A key that sets `target` to what `convert` makes of its value. `default`: ours for the value that the tool takes
    where the key is missing; None: nothing needs to be set."""

    target: str
    convert: Callable[[Any], Any] = same
    default: Any = None


@dataclass(frozen=True)
class Table:
    """All that is known of a tool's keys; names may be globs. A key that cannot be honoured does no harm where its
    value is false, 0, empty or none.

    `recognised`: one of these keys is in every file of the tool. `otherwise`, `meaningless`, `refused`: reasons.
    `data`: the settings of data sets, whose keys `data_keys` are. It returns ours by dotted key; raises RefusedError.
    """

    tool: str
    recognised: str
    sets: Mapping[str, Sets]
    otherwise: Mapping[str, str]
    meaningless: Mapping[str, str]
    refused: Mapping[str, str]
    data_keys: tuple[str, ...]
    data: Callable[[Mapping[str, Any]], dict[str, Any]]
    default_warmup: float = 0.0  # share of the steps, of a file that says nothing; at most 100 of them


@dataclass
class Findings:
    """What became of a file's keys. `settings`: by dotted key of ours. Others: lines of key and reason."""

    settings: dict[str, Any] = field(default_factory=dict)
    otherwise: list[str] = field(default_factory=list)
    meaningless: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def apply(table: Table, tree: Mapping[str, Any], known: frozenset[str]) -> Findings:
    """`known`: dotted keys that a configuration may have, and those that convert_config.py resolves."""
    found = Findings()
    for rule in table.sets.values():
        if rule.default is not None:
            found.settings[rule.target] = rule.default
    for key, value in tree.items():
        if value is not None and key not in table.data_keys:
            _take(table, str(key), value, found)
    try:
        found.settings |= table.data(tree)
    except RefusedError as error:
        found.refused.append(str(error))
    for target in sorted(found.settings.keys() - known):
        keys = [key for key, rule in table.sets.items() if rule.target == target and key in tree] or [table.tool]
        found.refused += [f"{key}: {target} comes with a later version" for key in keys]
        del found.settings[target]
    return found


def _take(table: Table, key: str, value: Any, found: Findings) -> None:
    if rule := table.sets.get(key):
        try:
            found.settings[rule.target] = rule.convert(value)
        except RefusedError as error:
            found.refused.append(f"{key}: {value}: {error}")
        return
    for same_key in (str.__eq__, fnmatchcase):  # a key itself counts before globs
        for reasons, lines in (
            (table.otherwise, found.otherwise),
            (table.meaningless, found.meaningless),
            (table.refused, found.refused),
        ):
            why = next((why for name, why in reasons.items() if same_key(key, name)), None)
            if why is not None:
                if lines is not found.refused or value not in HARMLESS:
                    lines.append(f"{key}: {why}")
                return
    found.refused.append(f"{key}: is no key of {table.tool} that is known here")
