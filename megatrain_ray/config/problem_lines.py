"""Describes each problem that the validation of a configuration has found in one line, and which key was meant."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megatrain_ray.config.other_tools import key_for, other_names, reason_for

EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_type": "an integer",
    "invalid_key": "a key of text",
    "model_type": "a mapping",
    "string_too_short": "a text that is not empty",
    "string_type": "text (in quotes where it looks like something else)",
    "tuple_type": "a list",
}


def describe_problems(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return all problems of a configuration of the class `root` that failed validation, a line for each."""
    problems = error.errors(include_url=False)
    return list(dict.fromkeys(line for problem in problems for line in _lines(problem, root)))


def _lines(problem: ErrorDetails, root: type[BaseModel]) -> Iterator[str]:
    location = problem["loc"]
    key = ".".join(str(part) for part in location)
    match problem["type"]:
        case "extra_forbidden":
            yield _unknown(key, root)
        case "missing":
            yield f"{key}: required. {_sentence(key, root)}".rstrip()
        case "value_error":
            yield f"{key}: {problem['ctx']['error']}"
        case "string_type" if isinstance(problem["input"], bool) and key in fields_by_key(root):
            yield f"{key}: expected {EXPECTED['string_type']}, got {_shown(problem['input'])}. {_sentence(key, root)}"
        case kind if kind in EXPECTED:
            yield f"{key or 'configuration'}: expected {EXPECTED[kind]}, got {_shown(problem['input'])}"
        case _:
            expected = problem["msg"].removeprefix("Input should be ")
            hint = "; FP8 is train.compute: fp8" if (key, problem["input"]) == ("train.precision", "fp8") else ""
            yield f"{key}: expected {expected}, got {_shown(problem['input'])}{hint}"


def _sentence(key: str, root: type[BaseModel]) -> str:
    """Return the first sentence of a key's description."""
    field = fields_by_key(root).get(without_numbers(key))
    return " ".join(((field and field.description) or "").split()).partition(". ")[0]


def _unknown(key: str, root: type[BaseModel]) -> str:
    group, _, name = without_numbers(key).rpartition(".")
    keys = list(fields_by_key(root))
    siblings = [other for other in keys if other.rpartition(".")[0] == group]
    near = key_of(key, root) or key_of(name, root) or _nearest(name, siblings, cutoff=0.8)
    if near is None and (reason := reason_for(name)):
        return f"{key}: unknown key; {reason}"
    if group and near and near.endswith(f".{name}"):  # train.beta: of distillation, preference or policy
        namesakes = [other for other in keys if other.startswith(f"{group}.") and other.endswith(f".{name}")]
        near = " or ".join(other for other in namesakes if other.count(".") == near.count(".")) or near
    near = near or _nearest_alias(name, root) or _nearest(name, siblings) or _nearest(name, keys, cutoff=0.8)
    hint = f"did you mean {near}?" if near else f"expected one of {', '.join(siblings)}"
    return f"{key}: unknown key; {hint}"


def key_of(name: str, root: type[BaseModel]) -> str | None:
    """Return the key of a configuration that a name stands for: its last part, or another tool's name for it."""
    keys = list(fields_by_key(root))
    named = sorted((key for key in keys if name in (key, key.rpartition(".")[2])), key=lambda key: key.count("."))
    return named[0] if named else key_for(name, keys)


def _nearest(name: str, keys: list[str], cutoff: float = 0.6) -> str | None:
    """Return the key whose last part is most similar to `name`; None if none is close."""
    by_name = {key.rpartition(".")[2]: key for key in reversed(keys)}
    close = get_close_matches(name, by_name, n=1, cutoff=cutoff)
    return by_name[close[0]] if close else None


def _nearest_alias(name: str, root: type[BaseModel]) -> str | None:
    """Return the key that another tool's name stands for, of which `name` is a misspelling; None if it is of none."""
    close = get_close_matches(name, other_names(), n=1, cutoff=0.85)
    return key_of(close[0], root) if close else None


def fields_by_key(root: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a configuration by dotted key, groups included, in the order of the classes."""
    fields = {}
    for name, field in root.model_fields.items():
        fields[name] = field
        for group in (field.annotation, *get_args(field.annotation)):  # the type itself, or a list's entries
            if isinstance(group, type) and issubclass(group, BaseModel):
                fields |= {f"{name}.{inner}": inner_field for inner, inner_field in fields_by_key(group).items()}
    return fields


def without_numbers(key: str) -> str:
    """Return the key without the numbers of list entries: `train.groups.0.lr` becomes `train.groups.lr`."""
    *groups, name = key.split(".")
    return ".".join([*(part for part in groups if not part.isdigit()), name])


def _shown(value: Any) -> str:
    """Return a value as it would be written in YAML, shortened to 60 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
