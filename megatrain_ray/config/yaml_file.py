"""Reads configurations from YAML files with overrides, and writes them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatrain_ray.config.other_tools import tool_of
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.errors import ConfigError
from megatrain_ray.read_file import regular_file

LENGTH_KEYS = ("train.steps", "train.epochs")
DATA_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst")
MERGE_TAG = "tag:yaml.org,2002:merge"
FLOAT_TAG = "tag:yaml.org,2002:float"
# In YAML 1.2, 1e-4 and 1E5 are numbers. PyYAML implements 1.1, which requires a dot and a signed exponent.
EXPONENT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$")
NUMBER_STARTS = list("-+.0123456789")
MOST_VALUES = 1_000_000  # of a file of settings, aliases counted as what they stand for
WIDTH = 1 << 20  # characters of a line of YAML: a text is never wrapped


class Loader(yaml.SafeLoader):
    """Loads safe YAML with the number syntax of YAML 1.2. A duplicate key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE_TAG:
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Writes YAML that `Loader` reads back: text that looks like a number of YAML 1.2 is quoted."""


for _end in (Loader, Dumper):
    _end.add_implicit_resolver(FLOAT_TAG, EXPONENT, NUMBER_STARTS)


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the configuration in a YAML file, changed by overrides.

    overrides: texts such as `train.lr=1e-4`. The value is YAML; `null` unsets a key.

    Raises ConfigError if the file does not exist, the YAML is broken (with line and column), an override has no `=`, or
    settings are unknown, invalid or inconsistent. One message lists all wrong settings, one per line, under the file or
    the override that made them.
    """
    tree = read_settings(Path(path))
    _check_one_length(overrides)
    of_file = _problems(tree) if overrides else []
    for text in overrides:
        override(tree, text)
    try:
        return TrainConfig.model_validate(tree)
    except ConfigError as error:
        if tool := tool_of(tree):
            raise ConfigError(
                f"{path}: is a configuration of {tool}; megatrain convert-config {shlex.quote(str(path))} --out "
                "OURS.yaml makes one of it"
            ) from None
        by_key = {text.partition("=")[0]: text for text in overrides}
        raise ConfigError(*_with_origins(str(error).splitlines(), of_file, str(path), by_key)) from None


def _check_one_length(overrides: Sequence[str]) -> None:
    """Raise ConfigError if overrides give both train.steps and train.epochs, of which one would replace the other."""
    given = [
        text for key in LENGTH_KEYS for text in overrides if text.startswith(f"{key}=") and not text.endswith("=null")
    ]
    if len({text.partition("=")[0] for text in given}) > 1:
        raise ConfigError(f"overrides {' and '.join(map(repr, given))}: both say how long to train; give one of them")


def _problems(tree: Mapping[str, Any]) -> list[str]:
    try:
        TrainConfig.model_validate(tree)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _with_origins(
    problems: Sequence[str], of_file: Sequence[str], path: str, overrides: Mapping[str, str]
) -> list[str]:
    """Return the problems as lines, by origin: a single line for one problem, otherwise a list under each origin.

    of_file: those problems that the file has without overrides.
    overrides: text of each override (`train.lr=1e-4`) by its key.
    """
    by_origin: dict[str, list[str]] = {}
    for problem in problems:
        origin = path if problem in of_file else _origin(problem, path, overrides)
        by_origin.setdefault(origin, []).append(problem)
    if len(problems) == 1:
        return [f"{next(iter(by_origin))}: {problems[0]}"]
    return [line for origin, found in by_origin.items() for line in (f"{origin}:", *found)]


def _origin(problem: str, path: str, overrides: Mapping[str, str]) -> str:
    """Return the origin of a problem that the file without overrides does not have.

    That is the overrides of the keys that the problem names. If it names none, the origin is the file together with all
    overrides, since a setting of the file may be part of the problem.
    """
    stated = problem.partition(";")[0]  # the remedy after the semicolon may name other keys
    key = re.split(r"[: ]", stated, maxsplit=1)[0]
    named = [text for name, text in overrides.items() if _names(stated, name) or name.startswith(f"{key}.")]
    if named:
        return f"override {', '.join(map(repr, named))}"
    return " ".join([path, *(["with", *overrides.values()] if overrides else [])])


def _names(text: str, key: str) -> bool:
    """Return whether the text contains this key, or a key inside of it."""
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) is not None


def read_settings(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, unchecked.

    Raises ConfigError if there is no such file, its YAML is broken, or it holds no mapping.
    """
    if path.suffix.lower() in DATA_SUFFIXES and path.is_file():
        raise ConfigError(f"{path} is a file of data; expected a configuration, a YAML that names it under data.path")
    tree = _parse(_read(path), str(path))
    if not isinstance(tree, dict):
        kind = "nothing" if tree is None else f"a {type(tree).__name__}"
        raise ConfigError(f"{path}: expected a mapping of settings, got {kind}; see examples/ for a configuration")
    return tree


def dump_config(config: TrainConfig) -> str:
    """Return YAML that `load_config` reads back as an equal configuration."""
    return dump_settings(config.model_dump())


def dump_settings(tree: Mapping[str, Any]) -> str:
    """Return YAML that `read_settings` reads back as an equal mapping."""
    return yaml.dump(dict(tree), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """Return the configuration as plain data that can be written as JSON."""
    return config.model_dump(mode="json")


def _read(path: Path) -> str:
    try:
        return regular_file(path).read_text(encoding="utf-8")
    except OSError as error:
        inside = path / "config.yaml"
        hint = f"; that of the run there is {inside}" if inside.is_file() else ""
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror} (relative paths start at {Path.cwd()}){hint}"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}; expected YAML text") from None


def _parse(text: str, where: str) -> Any:
    try:
        return _load(text, where)
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem or error.context
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{where}{position}: broken YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{where}: it is nested too deeply; expected settings in a few levels") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: YAML reads 2024-02-30 as a date, which does not exist
        raise ConfigError(f"{where}: broken YAML: {error}") from None


def _load(text: str, where: str) -> Any:
    """Return the value of a YAML text. Raises ConfigError if aliases make it much larger than it is written."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _num_values(node, {}) > MOST_VALUES:
            raise ConfigError(
                f"{where}: its aliases (*name) stand for more than {MOST_VALUES} values; write the values themselves"
            )
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _num_values(node: yaml.Node, known: dict[int, float]) -> float:
    """Return how many values a node holds, where each alias counts as what it stands for; infinite within itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        inner = (part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,)))
        known[id(node)] = 1 + sum(_num_values(part, known) for part in inner)
    return known[id(node)]


def override(tree: dict[str, Any], setting: str) -> None:
    """Set `key.sub=value` in nested mappings, and create those that are missing.

    Of train.steps and train.epochs, one replaces the other.

    Raises ConfigError if the text has no `=`, or if a part of the key holds something other than a mapping.
    """
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {setting!r}: expected key=value, as in train.lr=1e-4")
    value = _parse(text, f"override {setting!r}")
    _replace_length(tree, {key: value})
    _set(tree, key, value, f"override {setting!r}")


def set_keys(tree: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Set settings in nested mappings. They may be nested, `{"train": {"lr": 1e-4}}`, or have dotted keys.

    Of train.steps and train.epochs, one replaces the other.

    Raises ConfigError if a part of a dotted key holds something other than a mapping.
    """
    _replace_length(tree, dict(leaves(settings)))
    for name, value in settings.items():
        if not isinstance(value, Mapping) or "." in str(name):
            _set(tree, str(name), value, str(name))
            continue
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        for key, inner in value.items():
            _set(tree, f"{name}.{key}", inner, f"{name}.{key}")


def _set(tree: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set a dotted key in nested mappings. `where`: named in the message of ConfigError."""
    *groups, name = key.split(".")
    for depth, group in enumerate(groups, start=1):
        if tree.get(group) is None:
            tree[group] = {}
        tree = tree[group]
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{where}: {'.'.join(groups[:depth])} is {shown(tree)}, expected a mapping to set a key in"
            )
    tree[name] = value


def _replace_length(tree: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Remove train.steps from the tree if only train.epochs is `given`, by its dotted key, and the other way round."""
    named = [key for key in LENGTH_KEYS if given.get(key) is not None]
    if len(named) == 1 and isinstance(train := tree.get("train"), dict):
        train.pop("steps" if named == ["train.epochs"] else "epochs", None)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested mappings, each with its dotted key."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def shown(value: Any) -> str:
    """Return a value as it would be written in YAML, on one line."""
    return yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=WIDTH).removesuffix("...\n").strip()
