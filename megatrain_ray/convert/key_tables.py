"""Defines the tables of other tools' keys, and applies a table to a configuration file.

A table says for each key what it sets here, or why it sets nothing. If the meaning of a key depends on other keys, it
sets a name that is no setting of ours (`epochs`, `warmup_ratio`), and convert_config.py resolves it at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

# A key that cannot be honoured is accepted with one of these values: it then requests nothing.
HARMLESS: tuple[Any, ...] = (False, 0, "", [], {}, "none", "null")


class RefusedError(Exception):
    """Is raised for a value that cannot be honoured. The message says why."""


def same(value: Any) -> Any:
    return value


def number(value: Any) -> float:
    """Return the value as a number, also if it is text. Raises RefusedError if it is neither.

    YAML 1.1 and quotes turn numbers into text, and both tools accept that.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RefusedError("expected a number") from None


def whole(value: Any) -> int:
    """Return the value as an integer. Raises RefusedError if it is none."""
    if (found := number(value)) != int(found):
        raise RefusedError("expected an integer")
    return int(found)


def or_null(value: Any) -> float | None:
    """Return the value as a number, or None for 0, which means off."""
    return number(value) or None


def negated(value: Any) -> bool:
    return not value


def names(value: Any) -> list[str]:
    """Return the entries of a list, or of a text separated by commas."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)


def one_of(choices: Mapping[str, Any], why: str) -> Callable[[Any], Any]:
    """Return a function that maps a choice to its value and raises RefusedError with `why` for other values."""

    def choose(value: Any) -> Any:
        if str(value) not in choices:
            raise RefusedError(why)
        return choices[str(value)]

    return choose


@dataclass(frozen=True)
class Sets:
    """Describes a key that sets one of our settings.

    target: dotted key of the setting, or a name that convert_config.py resolves.
    convert: converts the key's value to that of the target.
    default: value of the target if the key is missing, equal to the tool's default; None: nothing needs to be set.
    """

    target: str
    convert: Callable[[Any], Any] = same
    default: Any = None


@dataclass(frozen=True)
class Table:
    """Holds all that is known of a tool's keys. Names may be globs.

    A key that cannot be honoured is ignored if its value is false, 0, empty or none.

    tool: name of the tool.
    recognised: a key that every file of the tool has.
    sets: keys that set something, with what they set.
    otherwise: keys whose effect is achieved in another way here, with the reason.
    meaningless: keys without a meaning here, with the reason.
    refused: keys that cannot be honoured, with the reason.
    data_keys: keys of data sets.
    data: converts `data_keys` of a file to our settings by dotted key; raises RefusedError.
    """

    tool: str
    recognised: str
    sets: Mapping[str, Sets]
    otherwise: Mapping[str, str]
    meaningless: Mapping[str, str]
    refused: Mapping[str, str]
    data_keys: tuple[str, ...]
    data: Callable[[Mapping[str, Any]], dict[str, Any]]
    default_warmup: float = 0.0  # share of the steps if the file sets no warm-up; at most 100 steps


@dataclass
class Findings:
    """Collects what became of the keys of a file.

    settings: our settings by dotted key.
    otherwise, meaningless, refused: lines with a key and the reason, as in `Table`.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    otherwise: list[str] = field(default_factory=list)
    meaningless: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def apply(table: Table, tree: Mapping[str, Any], known: frozenset[str]) -> Findings:
    """Apply a table to a configuration file and return what became of its keys.

    tree: the configuration file.
    known: dotted keys of our configuration, and the names that convert_config.py resolves.
    """
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
    for same_key in (str.__eq__, fnmatchcase):  # an exact name takes precedence over globs
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
