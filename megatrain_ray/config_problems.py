"""What is wrong with a configuration, in one line a problem: the key, what was expected, what came, the nearest key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

LATER_KEYS = frozenset({"data.eval_path", "eval_every", "log", "spill"})

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


def describe_problems(error: ValidationError, root: type[BaseModel]) -> str:
    """All problems of a configuration that `root` refused, a line each."""
    problems = error.errors(include_url=False)
    return "\n".join(dict.fromkeys(line for problem in problems for line in _lines(problem, root)))


def _lines(problem: ErrorDetails, root: type[BaseModel]) -> Iterator[str]:
    location = problem["loc"]
    key = ".".join(str(part) for part in location)
    match problem["type"]:
        case "extra_forbidden":
            yield _unknown(key, problem["input"], root)
        case "missing":
            field = _fields(root).get(key)
            yield f"{key}: required. {(field and field.description) or ''}".rstrip()
        case "value_error":
            yield f"{key}: {problem['ctx']['error']}"
        case kind if kind in EXPECTED:
            yield f"{key or 'configuration'}: expected {EXPECTED[kind]}, got {_shown(problem['input'])}"
        case _:
            expected = problem["msg"].removeprefix("Input should be ")
            yield f"{key}: expected {expected}, got {_shown(problem['input'])}"


def _unknown(key: str, value: Any, root: type[BaseModel]) -> str:
    if key in LATER_KEYS:
        if isinstance(value, Mapping) and value:
            key = f"{key}.{next(iter(value))}"
        return f"{key}: comes with a later version; leave the key out"
    group, _, name = key.rpartition(".")
    keys = list(_fields(root))
    siblings = [other for other in keys if other.rpartition(".")[0] == group]
    near = _nearest(name, siblings) or _nearest(name, keys)
    hint = f"did you mean {near}?" if near else f"expected one of {', '.join(siblings)}"
    return f"{key}: unknown key; {hint}"


def _nearest(name: str, keys: list[str]) -> str | None:
    """The key whose last part is most like `name`."""
    by_name = {key.rpartition(".")[2]: key for key in reversed(keys)}
    close = get_close_matches(name, by_name, n=1)
    return by_name[close[0]] if close else None


def _fields(root: type[BaseModel]) -> dict[str, FieldInfo]:
    """Every dotted key, groups included, in the order of the classes."""
    fields = {}
    for name, field in root.model_fields.items():
        fields[name] = field
        group = field.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            fields |= {f"{name}.{inner}": inner_field for inner, inner_field in group.model_fields.items()}
    return fields


def _shown(value: Any) -> str:
    """A value as it would stand in YAML, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
