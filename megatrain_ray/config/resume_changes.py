"""Compares the configuration of a resume with that of the run, and says which settings a resume may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatrain_ray.config.problem_lines import without_numbers
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import LENGTH_KEYS, leaves, shown

SAVE_KEYS = ("save_every", "save_keep", "save_keep_every", "save_best", "save_compress", "save_mirror")
EVAL_KEYS = ("eval_every", "eval_patience", "data.eval_path", "data.eval_dataset")
GROUPS = ("hardware", "spill", "log")
LIMIT_KEYS = ("max_failures", "max_skipped", "train.rollouts.timeout_s", "train.rollouts.keep")
SERVER_KEYS = tuple(f"train.rollouts.server{key}" for key in ("", ".url", ".weights", ".sleeps", ".timeout_s"))
RATE_KEYS = (
    "train.lr", "train.min_lr", "train.schedule", "train.warmup_steps", "train.warmup_from_zero",
    "train.weight_decay", "train.betas", "train.eps", "train.clip", "train.groups.lr", "train.groups.weight_decay",
)  # fmt: skip
STREAM_KEYS = ("data.stream",)  # free only where it is set before and after: the position in a save is a stream's
FREE_ON_RESUME = (
    *LENGTH_KEYS, "train.moments", "run_dir", "resume", *RATE_KEYS, *SAVE_KEYS, *EVAL_KEYS, *LIMIT_KEYS, *SERVER_KEYS,
    *STREAM_KEYS, *GROUPS,
)  # fmt: skip

SPLIT_KEYS = ("train.micro_batch_size", "train.accumulate")


def resume_diff(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Return the keys that differ although a resume may not change them, as `data.seed: 0 -> 1`.

    A split into micro-batches that `new` leaves to the plan is no difference. Nor is another split of the same batch on
    another number of GPUs.
    """
    return [f"{key}: {shown(before)} -> {shown(after)}" for key, before, after in _differing(old, new, free=False)]


def train_changes(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings of `train` that a resume changed and may change, as {key: (before, after)}."""
    found = _differing(old, new, free=True)
    return {key: (before, after) for key, before, after in found if key.startswith("train.")}


def _differing(old: TrainConfig, new: TrainConfig, *, free: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, before, after) of the settings that differ, either those that a resume may change or the others."""
    before, after = dict(_one_by_one(old.resolve())), dict(_one_by_one(new.resolve(old)))
    others = old.hardware.num_gpus != new.hardware.num_gpus
    if others or new.train.split_is_free:
        after |= {key: before.get(key) for key in SPLIT_KEYS if others or after[key] is None}
    for key in dict.fromkeys([*before, *after]):
        is_free = not {without_numbers(key), key.partition(".")[0]}.isdisjoint(FREE_ON_RESUME)
        is_free &= key not in STREAM_KEYS or None not in (before.get(key), after.get(key))
        if before.get(key) != after.get(key) and is_free == free:
            yield key, before.get(key), after.get(key)


def _one_by_one(config: TrainConfig) -> Iterator[tuple[str, Any]]:
    """Yield all settings by dotted key, those of a parameter group too: train.groups.0.lr."""
    tree = config.model_dump()
    tree["train"]["groups"] = {str(number): group for number, group in enumerate(tree["train"]["groups"])}
    return leaves(tree)
