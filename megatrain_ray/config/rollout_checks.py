"""Finds settings of sampled answers that do not go together."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain_ray.config.groups import Settings
from megatrain_ray.config.train_groups import RolloutsConfig
from megatrain_ray.config.values import listed, weight_of


def rollout_disagreements(config: Settings) -> Iterator[str]:
    """Yield problems of data.kind: prompts and train.rollouts; each line says what to set instead."""
    train, data = config.train, config.data
    rollouts, is_prompts = train.rollouts, data.kind == "prompts"
    if rollouts is None:
        if is_prompts and train.objective in ("grpo", "sft"):  # of others another line says what to set
            yield "train.rollouts is required with data.kind: prompts: {rewards: […]} at least"
        return
    if not is_prompts:
        yield f"train.rollouts: answers prompts, and data.kind is {data.kind}; set data.kind: prompts, or leave it out"
        return
    if any(weight_of(source) is not None for source in listed(data.path)):
        yield "data.path: weights go with other kinds than prompts; give the files without weights"
    if rollouts.server is not None and config.hardware.num_hosts > 1:
        yield (
            f"train.rollouts.server: gets its weights from one host, and hardware.num_hosts is "
            f"{config.hardware.num_hosts}; leave it out, or train on one host"
        )
    yield from _number_disagreements(config, rollouts)


def _number_disagreements(config: Settings, rollouts: RolloutsConfig) -> Iterator[str]:
    agrees = config.train.batch_size in (None, config.num_step_rows)  # else another line says so
    if agrees and (batch_size := config.num_step_rows) % rollouts.group_size:
        yield (
            f"train.batch_size: {batch_size} answers are no whole groups of train.rollouts.group_size: "
            f"{rollouts.group_size}; set a multiple of that"
        )
    if rollouts.reward_weights is not None and len(rollouts.reward_weights) != len(rollouts.rewards):
        yield (
            f"train.rollouts.reward_weights: {len(rollouts.reward_weights)} numbers for {len(rollouts.rewards)} "
            "rewards; give one for each"
        )
    if rollouts.max_new_tokens >= config.data.seq_len:
        yield (
            f"train.rollouts.max_new_tokens: {rollouts.max_new_tokens} leaves no room for a prompt in data.seq_len: "
            f"{config.data.seq_len}; lower it, or raise that"
        )
