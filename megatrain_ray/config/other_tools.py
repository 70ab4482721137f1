"""Says what keys of other tools are called here, from the tables by which convert-config translates them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLES = Path(__file__).parents[1] / "convert"  # key_tables.py there describes and checks them
TOOLS = ("llama_factory", "axolotl")
# Our keys for the names that a table resolves together with others (convert/resolve_settings.py).
RESOLVED_KEYS = {
    "revision": "model.path",
    "neat_packing": "data.packing",
    "enable_thinking": "data.chat_template_args",
    "epochs": "train.epochs",
    "max_steps": "train.steps",
    "warmup_steps": "train.warmup_steps",
    "warmup_ratio": "train.warmup_steps",
    "min_lr_ratio": "train.min_lr",
    "method": "lora",
    "beta1": "train.betas",
    "beta2": "train.betas",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "template": "data.chat_template",
    "optimizer": "train.optimizer",
    "logging_steps": "log.every",
    "loraplus_ratio": "train.groups",
    "tf32": "train.precision",
    "seed": "data.seed",
    "data_seed": "data.seed",
    "save_strategy": "save_every",
    "save_steps": "save_every",
    "saves_per_epoch": "save_every",
    "eval_strategy": "eval_every",
    "eval_steps": "eval_every",
    "evals_per_epoch": "eval_every",
    "embedding_lr": "train.groups",
    "embedding_lr_scale": "train.groups",
    "lr_groups": "train.groups",
    "every_linear": "lora.match",
    "modules_to_save": "train.trainable",
    "freeze_layers": "train.freeze",
    "freeze_modules": "train.freeze",
    "freeze_extra": "train.freeze",
}
OTHER_NAMES = {  # of TRL and Transformers, as far as no table sets something for them
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "optim": "train.optimizer",
}


def key_for(name: str, keys: Collection[str]) -> str | None:
    """Return the one of our `keys` that does what another tool's key of this name does; None if there is none."""
    targets = [rule.get("sets") for table in _tables() if isinstance(rule := table["sets"].get(name), dict)]
    for target in (*targets, OTHER_NAMES.get(name), name):
        ours = RESOLVED_KEYS.get(str(target), target)
        if ours in keys:
            return ours
    return None


def reason_for(name: str) -> str | None:
    """Return how what another tool's key of this name sets is done here, or why not; None if no tool has such a key."""
    reasons = {
        key: why for section in ("refused", "meaningless", "otherwise") for table in _tables()[::-1]
        for key, why in table[section].items()
    }  # fmt: skip
    why = reasons.get(name) or next((why for key, why in reasons.items() if fnmatchcase(name, key)), None)
    return why and _shared()["reasons"].get(why, why)


def tool_of(tree: Mapping[str, Any]) -> str | None:
    """Return the name of the tool whose configuration file has these keys; None if it is of none that is known."""
    return next((str(table["tool"]) for table in _tables() if table["recognised"] in tree), None)


@cache
def _tables() -> tuple[dict[str, Any], ...]:
    return tuple(yaml.safe_load((TABLES / f"{name}.yaml").read_text(encoding="utf-8")) for name in TOOLS)


@cache
def _shared() -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((TABLES / "shared.yaml").read_text(encoding="utf-8"))
    return tree
