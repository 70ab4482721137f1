"""Reads the tables of other tools' keys, and applies a table to a configuration file.

A table is a YAML file in this folder. It says for each key what it sets here, or why it sets nothing. If the meaning of
a key depends on other keys, it sets a name that is no setting of ours (`epochs`, `warmup_ratio`), and
resolve_settings.py makes settings of these names at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from megatrain_ray.config.other_tools import SECTIONS, reasons_of
from megatrain_ray.config.yaml_file import read_settings
from megatrain_ray.convert.conversions import CONVERSIONS, RefusedError

# A key that cannot be honoured is accepted with one of these values: it then requests nothing.
HARMLESS: tuple[Any, ...] = (False, 0, "", [], {}, "none", "null")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Rule(_Section):
    """Says what a key sets.

    target: dotted key of our setting, or a name that resolve_settings.py resolves; None: the value is only checked.
    conversion: name of a function in `CONVERSIONS`, or our value for each of the tool's.
    refusal: reason for other values than those of `conversion`; without it they set nothing.
    default: the tool's own default, which is converted as well; None: nothing is set if the key is missing.
    """

    target: str | None = Field(None, alias="sets")
    conversion: str | dict[str, Any] | None = Field(None, alias="as")
    refusal: str = ""
    default: Any = None

    def convert(self, value: Any) -> Any:
        """Return our value. Raises RefusedError if there is none."""
        if isinstance(self.conversion, dict):
            if str(value) not in self.conversion:
                raise RefusedError(self.refusal)
            return self.conversion[str(value)]
        return CONVERSIONS[self.conversion](value) if self.conversion else value


class DataSetRules(_Section):
    """Says how the entries of a list of data sets are read (axolotl.yaml has comments).

    alpaca: what is told of records in the Alpaca format.
    answers: by our kind of data, or reward, types of preferences and labelled answers up to their dot, each with the
        name of the template that it writes, if it is not the tokenizer's.
    answer_formats: what may stand after the dot.
    """

    types: dict[str, tuple[str, str | None]]
    file_formats: tuple[str, ...]
    accepted: dict[str, list[Any] | None]
    alpaca: str
    answers: dict[str, dict[str, str | None]]
    answer_formats: tuple[str, ...]


class Table(_Section):
    """Holds all that is known of a tool's keys. Names in `otherwise`, `meaningless` and `refused` may be globs.

    A key that cannot be honoured, or is achieved in another way, is ignored if its value is false, 0, empty or none.

    tool: name of the tool.
    recognised: a key that every file of the tool has.
    sets: keys that set something, with what they set.
    otherwise: keys whose effect is achieved in another way here, with the reason; they may be in `sets` as well.
    meaningless: keys without a meaning here, with the reason.
    refused: keys that cannot be honoured, with the reason.
    data_keys: keys of data sets, which convert_config.py translates.
    data_sets: how it does so, where that is data.
    default_warmup: share of the steps if the file sets no warm-up; at most 100 steps.
    """

    tool: str
    recognised: str
    sets: dict[str, Rule]
    otherwise: dict[str, str]
    meaningless: dict[str, str]
    refused: dict[str, str]
    data_keys: tuple[str, ...]
    data_sets: DataSetRules | None = None
    default_warmup: float = 0.0


@cache
def load_table(name: str) -> Table:
    """Return the table in the YAML file of this name, with what shared.yaml says in place of its names."""
    shared, tree = (read_settings(Path(__file__).parent / f"{file}.yaml") for file in ("shared", name))
    reasons, choices = shared["reasons"], shared["choices"]
    for section in SECTIONS:
        tree[section] = reasons_of(tree[section], reasons)
    for rule in tree["sets"].values():
        if isinstance(choice := rule.get("as"), str) and choice in choices:
            rule |= choices[choice]
        if "refusal" in rule:
            rule["refusal"] = reasons.get(rule["refusal"], rule["refusal"])
    return Table.model_validate(tree)


@dataclass
class Findings:
    """Collects what became of the keys of a file.

    settings: our settings by dotted key.
    otherwise, meaningless: reasons by key, as in `Table`.
    refused: lines with a key and the reason.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    otherwise: dict[str, str] = field(default_factory=dict)
    meaningless: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def apply(table: Table, tree: Mapping[str, Any]) -> Findings:
    """Apply a table to the configuration file `tree` and return what became of its keys, except `table.data_keys`."""
    found = Findings()
    for rule in table.sets.values():
        if rule.target and rule.default is not None:
            found.settings[rule.target] = rule.convert(rule.default)
    for key, value in tree.items():
        if value is None or key in table.data_keys:
            continue
        if key in table.sets:
            _set(table.sets[key], key, value, found)
        if key not in table.sets or key in table.otherwise:
            _list(table, str(key), value, found)
    return found


def _set(rule: Rule, key: str, value: Any, found: Findings) -> None:
    try:
        converted = rule.convert(value)
    except RefusedError as error:
        if str(error):
            found.refused.append(f"{key}: {value}: {error}")
        return
    if rule.target:
        found.settings[rule.target] = converted


def _list(table: Table, key: str, value: Any, found: Findings) -> None:
    for same_key in (str.__eq__, fnmatchcase):  # an exact name takes precedence over globs
        for reasons in (table.otherwise, table.meaningless, table.refused):
            why = next((why for name, why in reasons.items() if same_key(key, name)), None)
            if why is None:
                continue
            if reasons is table.meaningless:
                found.meaningless[key] = why
            elif value not in HARMLESS and reasons is table.otherwise:
                found.otherwise[key] = why
            elif value not in HARMLESS:
                found.refused.append(f"{key}: {why}")
            return
    found.refused.append(f"{key}: is no key of {table.tool} that is known here")


def by_reason(reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each reason with its keys. `reasons`: by key."""
    keys: dict[str, list[str]] = {}
    for key, why in reasons.items():
        keys.setdefault(why, []).append(key)
    return [f"{', '.join(names)}: {why}" for why, names in keys.items()]
