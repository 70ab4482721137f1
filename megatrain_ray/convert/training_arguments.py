"""Translates Transformers' TrainingArguments into settings. LLaMA-Factory's keys extend them, so its table is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from megatrain_ray.config.checks import known_keys
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.logs import say
from megatrain_ray.convert.convert_config import RESOLVED, resolve
from megatrain_ray.convert.key_tables import Sets, Table, apply
from megatrain_ray.convert.llama_factory import LLAMA_FACTORY
from megatrain_ray.errors import ConfigError

SPLIT = ("batch_size", "micro_batch_size", "accumulate")


def with_arguments(args: Any, settings: Mapping[str, Any], num_records: int | None) -> dict[str, Any]:
    """Return `settings` extended by what `args` say. `settings` take precedence.

    Without other settings each record becomes a row of its own. Fields of `args` without a meaning here are printed.

    args: a TrainingArguments object.
    settings: our settings, nested.
    num_records: number of training records, which converts epochs to steps; None if it is not known.

    Raises ConfigError if fields cannot be honoured.
    """
    names = {field.name for field in dataclasses.fields(args)}
    found = apply(_table(names), _changed(args, names), known_keys(TrainConfig) | RESOLVED)
    if found.refused:
        raise ConfigError("\n  ".join(["args: cannot be honoured; leave out, or set otherwise:", *found.refused]))
    if found.meaningless:
        say("\n  ".join(["args: without a meaning here:", *found.meaningless]))
    given = dict(found.settings) | {"data.packing": False}
    if given.get("eval_strategy") == "no":
        given["eval_every"] = 0

    def count(tree: Mapping[str, Any]) -> int:
        if num_records is None or tree["data"]["packing"] or tree["data"].get("kind") == "pretrain":
            raise ConfigError(
                "args: epochs cannot be made steps, as rows are counted by records: give max_steps, and save_steps in "
                "whole numbers, or train.steps and save_every among the settings"
            )
        return num_records

    tree = resolve(given, 0.0, settings, count=count)
    own = settings.get("train", {})
    if any(own.get(key) for key in SPLIT):  # if `settings` set one of these, the others remain open
        tree["train"] = {key: value for key, value in tree["train"].items() if key not in SPLIT or key in own}
    return tree


def _table(names: set[str]) -> Table:
    """Return LLaMA-Factory's table without keys that are no fields of TrainingArguments."""
    sets = {name: rule for name, rule in LLAMA_FACTORY.sets.items() if name in names}
    return dataclasses.replace(
        LLAMA_FACTORY,
        tool="TrainingArguments",
        sets={**sets, "eval_strategy": Sets("eval_strategy", default="no")},
        data_keys=(),
        data=lambda _: {},
    )


def _changed(args: Any, names: set[str]) -> dict[str, Any]:
    """Return the fields of `args` whose values differ from the defaults.

    Some defaults depend on other fields, so the comparison is with an object that is created without settings.
    """
    plain = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu)
    found = {name: getattr(args, name) for name in sorted(names) if getattr(args, name) != getattr(plain, name)}
    values = {**found, "output_dir": args.output_dir, "use_cpu": args.use_cpu}
    return {key: value.value if isinstance(value, Enum) else value for key, value in values.items()}
