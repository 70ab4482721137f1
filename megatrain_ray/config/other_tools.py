"""Says what keys of other tools are called here, from the tables by which convert-config translates them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLES = Path(__file__).parents[1] / "convert"  # key_tables.py there describes and checks them
TOOLS = ("llama_factory", "axolotl")
SECTIONS = ("otherwise", "meaningless", "refused")  # of keys that set nothing here
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
    "objective": "train.objective",
    "cpo_alpha": "train.preference.sft_weight",
    "rpo_alpha": "train.preference.sft_weight",
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
    "freeze_vision_tower": "train.vision",
    "freeze_multi_modal_projector": "train.vision",
    "freeze_mm_modules": "train.vision",
    "streaming": "data.stream",
}
OTHER_NAMES = {  # of any tool, as far as no table sets something for them
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "optim": "train.optimizer",
    "eval_split": "data.eval_fraction",
    "test_size": "data.eval_fraction",
    "loss": "train.objective",
    "loss_type": "train.objective",
    "epsilon": "train.policy.clip_low",
    "epsilon_high": "train.policy.clip_high",
    "importance_sampling_level": "train.policy.level",
    "vllm_importance_sampling_mode": "train.policy.correction",
    "vllm_importance_sampling_cap": "train.policy.correction_max",
    "vllm_importance_sampling_clip_max": "train.policy.correction_max",
    "vllm_importance_sampling_clip_min": "train.policy.correction_min",
    "mask_truncated_completions": "data.unfinished",
    "teacher": "train.distillation.teacher",
    "teacher_model": "train.distillation.teacher",
    "teacher_model_name_or_path": "train.distillation.teacher",
    "kd_temperature": "train.distillation.temperature",
    "kd_beta": "train.distillation.beta",
    "kd_ce_alpha": "train.distillation.sft_weight",
    "model.name": "model.path",
    "model.id": "model.path",
}


def key_for(name: str, keys: Collection[str]) -> str | None:
    """Return the one of our `keys` that does what another tool's key of this name does; None if there is none."""
    targets = [rule.get("sets") for table in _tables() if isinstance(rule := table["sets"].get(name), dict)]
    for target in (*targets, OTHER_NAMES.get(name), name):
        ours = RESOLVED_KEYS.get(str(target), target)
        if ours in keys:
            return ours
    return None


def other_names() -> list[str]:
    """Return the names that other tools have for what our keys do."""
    return [name for names in (OTHER_NAMES, *(table["sets"] for table in _tables())) for name in names]


def reason_for(name: str) -> str | None:
    """Return what to do here in place of another tool's key, or why nothing can be done; None if no tool has it."""
    reasons = {
        key: why for section in reversed(SECTIONS) for table in _tables()[::-1]
        for key, why in reasons_of(table[section], _shared()["reasons"]).items()
    }  # fmt: skip
    return reasons.get(name) or next((why for key, why in reasons.items() if fnmatchcase(name, key)), None)


def reasons_of(section: Mapping[str, Sequence[str]], named: Mapping[str, str]) -> dict[str, str]:
    """Return the reason of each key of a table's section, which lists keys by reason.

    named: reasons that a section may refer to by a name.
    """
    return {key: named.get(why, why) for why, keys in section.items() for key in keys}


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
