"""Implements `megatrain convert-config`: translates a configuration of LLaMA-Factory or Axolotl."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatrain_ray.config.checks import known_keys
from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import dump_settings, override, read_settings
from megatrain_ray.convert.axolotl import AXOLOTL
from megatrain_ray.convert.foreign_groups import axolotl_groups, trained_layers
from megatrain_ray.convert.foreign_values import UNWARMED
from megatrain_ray.convert.key_tables import Findings, apply
from megatrain_ray.convert.llama_factory import LLAMA_FACTORY
from megatrain_ray.convert.parameter_patterns import resolve_lora
from megatrain_ray.errors import ConfigError

TABLES = (LLAMA_FACTORY, AXOLOTL)
FREEZING = ("freeze_layers", "freeze_modules", "freeze_extra")
# Names that tables set and that are no settings of ours; `resolve` derives settings from them.
RESOLVED = frozenset(
    {
        "revision", "neat_packing", "enable_thinking", "epochs", "max_steps", "warmup_steps", "warmup_ratio",
        "min_lr_ratio", "method", "optimizer", "special_tokens", "beta1", "beta2", "bf16", "tf32", "seed", "data_seed",
        "save_strategy", "save_steps", "saves_per_epoch", "eval_strategy", "eval_steps", "evals_per_epoch",
        "embedding_lr", "embedding_lr_scale", "lr_groups", "every_linear", "beside", *FREEZING,
    }
)  # fmt: skip
MOST_WARMUP_STEPS = 100  # upper limit of Axolotl's default warm-up
GROUPS = ("model", "data", "train", "lora", "hardware")


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
    table = next((table for table in TABLES if table.recognised in tree), None)
    if table is None:
        marks = ", ".join(f"{table.recognised} ({table.tool})" for table in TABLES)
        raise ConfigError(f"{path}: is of no tool that is known here; expected one of the keys {marks}")
    found = apply(table, tree, known_keys(TrainConfig) | RESOLVED)
    _settle_freezing(found, tree)
    refused = bool(found.refused)
    if refused and not lenient:
        return Conversion("", tuple(_report(found)), refused)
    settings = resolve(found.settings, table.default_warmup, overrides=overrides, num_gpus=num_gpus)
    TrainConfig.model_validate(settings)
    head = f"# From {path.name} of {table.tool}, by megatrain convert-config.\n"
    return Conversion(head + dump_settings(settings), tuple(_report(found)), refused)


def _settle_freezing(found: Findings, tree: Mapping[str, Any]) -> None:
    """Drop LLaMA-Factory's keys on freezing unless finetuning_type is freeze: otherwise they have no effect."""
    if found.settings.get("method") == "freeze":
        return
    for target in FREEZING:
        found.settings.pop(target, None)
    keys = [key for key in LLAMA_FACTORY.sets if LLAMA_FACTORY.sets[key].target in FREEZING and tree.get(key)]
    found.meaningless += [f"{key}: of finetuning_type: freeze" for key in keys]


def _report(found: Findings) -> list[str]:
    parts = {
        "done otherwise here": found.otherwise,
        "without a meaning here": found.meaningless,
        "cannot be honoured": found.refused,
    }
    return [line for title, lines in parts.items() if lines for line in (f"{title}:", *(f"  {line}" for line in lines))]


def resolve(
    found: Mapping[str, Any],
    default_warmup: float,
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    num_gpus: int = 1,
    count: Callable[[Mapping[str, Any]], int] | None = None,
) -> dict[str, Any]:
    """Return what a table has found as a tree of settings from which a configuration can be made.

    found: settings and names in `RESOLVED`, by dotted key.
    default_warmup: share of the steps for warm-up if nothing is set.
    settings, overrides: settings that take precedence over `found`, overrides over both.
    num_gpus: as in `convert`.
    count: counts the rows of an epoch; called only if epochs have to be converted to steps. None: tokenize the data and
        count.
    """
    given = dict(found)
    _resolve_model_and_data(given)
    _resolve_numbers(given)
    resolve_lora(given)
    _resolve_batch(given, num_gpus)
    theirs = {key: given.pop(key) for key in list(given) if key in RESOLVED}
    tree = _merged(_nested(given), settings or {})
    for text in overrides:
        override(tree, text)
    if "freeze_layers" in theirs and "trainable" not in tree["train"]:
        tree["train"]["trainable"] = _trainable(tree["model"], theirs)
    if groups := axolotl_groups(theirs, tree["train"].get("lr", 0.0)):
        tree["train"].setdefault("groups", groups)
    _resolve_steps(tree, _Clock(tree, theirs, count or _count), theirs, default_warmup)
    return {key: tree[key] for key in (*GROUPS, *tree) if key in tree}


def _merged(tree: dict[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the union of both trees, group by group. Values in `first` take precedence."""
    both = {key: {**tree.get(key, {}), **value} for key, value in first.items() if isinstance(value, Mapping)}
    return {**tree, **first, **both}


def _resolve_steps(tree: dict[str, Any], clock: _Clock, theirs: Mapping[str, Any], default_warmup: float) -> None:
    """Set everything that is counted in steps, some of which may be given as shares or epochs.

    What overrides have set is not changed.
    """
    train = tree["train"]
    train["steps"] = steps = train.get("steps") or clock.steps()
    if train["schedule"] == UNWARMED:
        train["schedule"] = "constant"
    else:
        warmup = _warmup(theirs.get("warmup_steps"), theirs.get("warmup_ratio"), default_warmup, steps)
        train.setdefault("warmup_steps", warmup)
    if "save_every" not in tree:
        tree["save_every"] = clock.every("save", steps)
    if "eval_path" in tree["data"] and "eval_every" not in tree:
        tree["eval_every"] = clock.every("eval", steps) or steps


def _resolve_model_and_data(given: dict[str, Any]) -> None:
    if (revision := given.pop("revision", "main")) != "main":
        given["model.path"] = f"{given.get('model.path')}@{revision}"
    if given.pop("neat_packing", False):
        given["data.packing"] = True
    thinking = given.pop("enable_thinking", None)
    if given.get("data.kind") == "sft" and thinking is not None:
        given["data.chat_template_args"] = {"enable_thinking": bool(thinking)}
    if given.get("data.kind") != "sft":
        given.pop("data.chat_template", None)
    if given.get("data.kind") == "pretrain":  # texts are cut into windows, never truncated
        given.pop("data.truncation", None)


def _resolve_numbers(given: dict[str, Any]) -> None:
    given.pop("optimizer", None)
    given.pop("special_tokens", None)
    given["train.betas"] = [given.pop("beta1"), given.pop("beta2")]
    bf16, tf32 = given.pop("bf16", False), given.pop("tf32", False)
    given["train.precision"] = "bf16" if bf16 else "tf32" if tf32 else "fp32"
    given["train.seed"] = given.pop("seed")
    given["data.seed"] = given.pop("data_seed", given["train.seed"])
    if (ratio := given.pop("min_lr_ratio", None)) is not None and "train.lr" in given:
        given["train.min_lr"] = ratio * given["train.lr"]


def _resolve_batch(given: dict[str, Any], num_gpus: int) -> None:
    """Set the accumulation. A given batch size takes precedence.

    Here one GPU processes the micro-batches of `num_gpus` GPUs one after the other.
    """
    micro = given.get("train.micro_batch_size") or 1
    if batch := given.pop("train.batch_size", None):
        given["train.accumulate"] = max(1, batch // micro)
    else:
        given["train.accumulate"] *= num_gpus


def _trainable(model: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    from megatrain_ray.model.model_source import open_model

    try:
        num_layers = open_model(ModelConfig.model_validate(model)).setting("num_hidden_layers")
    except ConfigError as error:
        raise ConfigError(
            f"freeze_trainable_layers cannot be followed, as the model's layers cannot be counted: {error}; or give "
            "train.trainable=[PATTERN] after the file"
        ) from None
    return trained_layers(theirs["freeze_layers"], num_layers, theirs["freeze_modules"], theirs.get("freeze_extra", ()))


def _warmup(warmup: float | None, ratio: float | None, default: float, steps: int) -> int:
    """Return the number of warm-up steps. A number below 1 is a share of the steps, as in Transformers 5."""
    if warmup and warmup >= 1:
        return min(int(warmup), steps)
    share = warmup or ratio
    if share is None and warmup is None:
        return min(int(default * steps), MOST_WARMUP_STEPS)
    return min(math.ceil((share or 0.0) * steps), steps)


class _Clock:
    """Converts epochs to steps. The data are counted on first use, and only once."""

    def __init__(
        self, tree: Mapping[str, Any], theirs: Mapping[str, Any], count: Callable[[Mapping[str, Any]], int]
    ) -> None:
        self._tree = tree
        self._theirs = theirs
        self._count = count

    def steps(self) -> int:
        if (most := self._theirs.get("max_steps", -1)) > 0:
            return int(most)
        return math.ceil(float(self._theirs["epochs"]) * self._per_epoch)

    def every(self, what: str, steps: int) -> int:
        """Return the number of steps between saves or evaluations; 0 if there are none before the end."""
        strategy = self._theirs.get(f"{what}_strategy")
        if strategy == "no":
            return 0
        if times := self._theirs.get(f"{what}s_per_epoch"):
            return math.ceil(self._per_epoch / float(times))
        if strategy == "epoch":
            return math.ceil(self._per_epoch)
        number = float(self._theirs.get(f"{what}_steps") or 0)
        return math.ceil(number * steps) if number < 1 else int(number)

    @cached_property
    def _per_epoch(self) -> float:
        train = self._tree["train"]
        size = train.get("batch_size") or (train.get("micro_batch_size") or 1) * (train.get("accumulate") or 1)
        return self._count(self._tree) / size


def _count(tree: Mapping[str, Any]) -> int:
    """Return the number of windows in an epoch. Tokenizes the data into the cache that the run will use."""
    from megatrain_ray.data.data_worker import count_windows
    from megatrain_ray.data.tokenize_data import tokenize
    from megatrain_ray.model.model_source import open_model

    provisional = {"steps": 1, "warmup_steps": 0, "schedule": "constant"}
    try:
        config = TrainConfig.model_validate({**tree, "train": {**tree["train"], **provisional}})
        vocab_size = open_model(config.model).setting("vocab_size")
        with tempfile.TemporaryDirectory() as folder:  # used only if the machine has no token cache
            tokens = tokenize(config.data, config.tokenizer, vocab_size, Path(folder))
            return count_windows(config.data, tokens, vocab_size)
    except ConfigError as error:
        raise ConfigError(
            f"epochs cannot be made steps, as sequences cannot be counted: {error}; or give train.steps=N after the "
            "file"
        ) from None


def _nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        *groups, name = key.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return tree
