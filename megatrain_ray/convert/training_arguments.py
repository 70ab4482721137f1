"""Translates Transformers' TrainingArguments and TRL's SFTConfig into settings.

LLaMA-Factory's keys extend those of TrainingArguments, so its table is used. sft_config.yaml has what TRL adds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from megatrain_ray.config.yaml_file import read_settings, set_keys
from megatrain_ray.console.logs import say
from megatrain_ray.convert.key_tables import Rule, Table, apply, by_reason, load_table
from megatrain_ray.convert.resolve_settings import resolve
from megatrain_ray.errors import ConfigError

SPLIT = ("batch_size", "micro_batch_size", "accumulate")


def is_arguments(args: Any) -> bool:
    """Return whether these are a transformers.TrainingArguments, whose class is not imported for that."""
    return dataclasses.is_dataclass(args) and hasattr(args, "output_dir")


def settings_of(args: Any) -> dict[str, Any]:
    """Return the settings of `args` as a tree, of TrainingArguments only those that are needed before the others."""
    if is_arguments(args):
        text_field = getattr(args, "dataset_text_field", "text")  # of an SFTConfig; data.kind is found by it
        return {"run_dir": args.output_dir, "data": {"text_field": text_field} if text_field != "text" else {}}
    if args is None:
        return {}
    if isinstance(args, (str, Path)):
        return read_settings(Path(args))
    if not isinstance(args, Mapping):
        raise ConfigError(
            f"args: expected settings, the path of a YAML file or TrainingArguments, got a {type(args).__name__}"
        )
    tree: dict[str, Any] = {}
    set_keys(tree, args)
    return tree


def with_arguments(args: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` extended by what `args` say. `settings` take precedence.

    Without other settings each record becomes a row of its own. Fields of `args` that set nothing here are printed.

    Raises ConfigError if fields cannot be honoured.
    """
    names = {field.name for field in dataclasses.fields(args)}
    table = _table(names)
    found = apply(table, _stated(args, names, table))
    if found.refused:
        refused = (f"  {line}" for line in found.refused)
        raise ConfigError("args: cannot be honoured; leave out, or set otherwise:", *refused)
    for title, reasons in (("done otherwise", found.otherwise), ("without a meaning", found.meaningless)):
        if reasons:
            say(f"args: {title} here:", *(f"  {line}" for line in by_reason(reasons)))
    given = {"data.packing": False, "data.kind": settings["data"].get("kind", "pretrain"), **found.settings}
    if given.get("eval_strategy") == "no":
        given["eval_every"] = 0
    tree = resolve(given, 0.0, settings)
    own = settings.get("train", {})
    if any(own.get(key) for key in SPLIT):  # if `settings` set one of these, the others remain open
        tree["train"] = {key: value for key, value in tree["train"].items() if key not in SPLIT or key in own}
    return tree


def _table(names: set[str]) -> Table:
    """Return LLaMA-Factory's and TRL's table without keys that are no fields of these arguments."""
    whole, trl = load_table("llama_factory"), load_table("sft_config")
    sets = {name: rule for name, rule in {**whole.sets, **trl.sets}.items() if name in names}
    sets["eval_strategy"] = Rule.model_validate({"sets": "eval_strategy", "default": "no"})
    own = {section: {**getattr(whole, section), **getattr(trl, section)} for section in ("meaningless", "refused")}
    return whole.model_copy(update={"tool": "TrainingArguments", "sets": sets, "data_keys": (), **own})


def _stated(args: Any, names: set[str], table: Table) -> dict[str, Any]:
    """Return the fields of `args` that set something, and the others whose values differ from the defaults.

    Some defaults depend on other fields, so the comparison is with an object that is created without settings. Defaults
    of a subclass differ from those of the table, so what sets something is always taken from the object. Only
    logging_steps is not: its default prints no line in a short run.
    """
    plain = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu)
    found = {
        name: getattr(args, name)
        for name in sorted(names)
        if name in table.sets.keys() - {"logging_steps"} or getattr(args, name) != getattr(plain, name)
    }
    return {key: value.value if isinstance(value, Enum) else value for key, value in found.items()}
