"""Implements `megatrain convert-config`: translates a configuration of LLaMA-Factory or Axolotl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import dump_settings, read_settings
from megatrain_ray.convert.data_sets import axolotl_data, llama_factory_data
from megatrain_ray.convert.key_tables import Findings, Table, apply, load_table
from megatrain_ray.convert.resolve_settings import FREEZING, resolve
from megatrain_ray.errors import ConfigError

DATA = {"llama_factory": llama_factory_data, "axolotl": axolotl_data}  # by the name of the table


@dataclass(frozen=True)
class Conversion:
    """Holds the result of a conversion.

    text: our YAML.
    report: lines about keys that set nothing.
    refused: whether some keys cannot be honoured.
    """

    text: str
    report: tuple[str, ...]
    refused: bool


def convert(path: Path, overrides: Sequence[str] = (), *, num_gpus: int = 1, lenient: bool = False) -> Conversion:
    """Translate the configuration file at `path`.

    num_gpus: number of GPUs that the file was meant for. An update gets that many times as many sequences.
    lenient: leave out keys that cannot be honoured. Otherwise, if there are any, `text` of the result is empty.

    Raises ConfigError if the file is from neither tool, if the resulting configuration is invalid, or if epochs have to
    be converted to steps and the sequences of the data cannot be counted.
    """
    tree = read_settings(path)
    tables = {name: load_table(name) for name in DATA}
    name = next((name for name, table in tables.items() if table.recognised in tree), None)
    if name is None:
        marks = ", ".join(f"{table.recognised} ({table.tool})" for table in tables.values())
        raise ConfigError(f"{path}: is of no tool that is known here; expected one of the keys {marks}")
    table = tables[name]
    found = apply(table, tree, DATA[name])
    _drop_unused_freezing(table, found, tree)
    refused, report = bool(found.refused), tuple(_report(found))
    if refused and not lenient:
        return Conversion("", report, refused)
    settings = resolve(found.settings, table.default_warmup, overrides=overrides, num_gpus=num_gpus)
    TrainConfig.model_validate(settings)
    head = f"# From {path.name} of {table.tool}, by megatrain convert-config.\n"
    return Conversion(head + dump_settings(settings), report, refused)


def _drop_unused_freezing(table: Table, found: Findings, tree: Mapping[str, Any]) -> None:
    """Drop LLaMA-Factory's keys on freezing unless finetuning_type is freeze: otherwise they have no effect."""
    if found.settings.get("method") == "freeze":
        return
    for target in FREEZING:
        found.settings.pop(target, None)
    keys = [key for key, rule in table.sets.items() if rule.target in FREEZING and tree.get(key)]
    found.meaningless += [f"{key}: of finetuning_type: freeze" for key in keys]


def _report(found: Findings) -> list[str]:
    parts = {
        "done otherwise here": found.otherwise,
        "without a meaning here": found.meaningless,
        "cannot be honoured": found.refused,
    }
    return [line for title, lines in parts.items() if lines for line in (f"{title}:", *(f"  {line}" for line in lines))]
