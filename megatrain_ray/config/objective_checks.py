"""Finds settings of the objective and of sampled answers that do not go together. Problems are as in checks.py."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.groups import Settings
from megatrain_ray.config.train_groups import LABELLED, OptimizationConfig, RolloutsConfig
from megatrain_ray.config.values import listed, weight_of

# The kind of data that objectives need which are not over single tokens.
PAIR_OBJECTIVES = ("dpo", "ipo", "hinge", "simpo", "orpo", "reward")
KIND_OF_OBJECTIVE = {
    **dict.fromkeys(PAIR_OBJECTIVES, "pairs"), **dict.fromkeys(LABELLED, "unpaired"), "grpo": "rollouts",
}  # fmt: skip
KINDS_OF_TOKENS = "pretrain, sft or tokens"  # for objectives over single tokens
RECORDS_OF_KIND = {
    "pairs": "pairs of a chosen and a rejected answer", "unpaired": "answers that are labelled good or bad",
    "rollouts": "sampled answers with rewards",
}  # fmt: skip

# Keys of `train.preference` that only some objectives have, and these objectives.
OBJECTIVES_OF_KEY = {
    "beta": ("dpo", "ipo", "hinge", "simpo", "orpo", *LABELLED),
    "gamma": ("simpo",),
    "label_smoothing": ("dpo", "simpo"),
    "sft_weight": ("dpo", "ipo", "hinge", "simpo"),
    "center_rewards_coefficient": ("reward",),
    "desirable_weight": LABELLED,
    "undesirable_weight": LABELLED,
}


def objective_disagreements(config: Settings) -> Iterator[str]:
    """Yield problems of the objective with the data, its own numbers and other keys."""
    train, data = config.train, config.data
    yield from _kind_disagreements(train.objective, data)
    yield from _distillation_disagreements(config)
    yield from _policy_disagreements(train)
    for key, objectives in OBJECTIVES_OF_KEY.items():
        is_set = getattr(train.preference, key) != type(train.preference).model_fields[key].default
        if is_set and train.objective not in objectives:
            expected = " or ".join(objectives)
            yield (
                f"train.preference.{key}: goes with train.objective: {expected}, and train.objective is "
                f"{train.objective}; leave the key out"
            )
    if train.reference is not None and not train.compares:
        hint = "set train.policy.beta, or leave the key out" if train.objective == "grpo" else "leave the key out"
        yield f"train.reference: train.objective: {train.objective} compares with no reference; {hint}"
    if train.objective == "sft":
        return
    for key in ("z_loss", "label_smoothing"):
        if getattr(train, key):
            has_own = train.objective in OBJECTIVES_OF_KEY.get(key, ())
            hint = f"; train.preference.{key} is another" if has_own else ""
            of = "is of single tokens" if data.documents_per_record else "changes the cross-entropy"
            yield f"train.{key}: {of}, and train.objective is {train.objective}; leave the key out{hint}"
    if config.hardware.cuda_graphs is True:
        yield (
            f"hardware.cuda_graphs: true goes with train.objective: sft so far, and it is {train.objective}; leave one "
            "of the two out"
        )


def _kind_disagreements(objective: str, data: DataConfig) -> Iterator[str]:
    """Yield a problem if the objective does not learn from such records."""
    kind = KIND_OF_OBJECTIVE.get(objective)  # None: sft or distill
    if data.kind == "prompts":
        if objective != "grpo":
            yield (
                f"train.objective: {objective} learns from no rewards, and data.kind is prompts; set train.objective: "
                f"grpo, or data.kind: {kind or KINDS_OF_TOKENS} without train.rollouts"
            )
    elif kind is not None and data.kind != kind:
        yield (
            f"data.kind: {data.kind}, and train.objective: {objective} is over {RECORDS_OF_KIND[kind]}; set "
            f"data.kind: {kind}"
        )
    elif objective == "distill" and data.documents_per_record:
        yield f"data.kind: {data.kind}, and train.objective: distill learns single answers; set {KINDS_OF_TOKENS}"
    elif kind is None and data.documents_per_record:
        fitting = [name for name, needed in KIND_OF_OBJECTIVE.items() if needed == data.kind]
        yield (
            f"train.objective: {objective} learns single answers, and data.kind is {data.kind}; set "
            f"{' or '.join(filter(None, [', '.join(fitting[:-1]), fitting[-1]]))}"
        )


def _distillation_disagreements(config: Settings) -> Iterator[str]:
    distillation, distills = config.train.distillation, config.train.objective == "distill"
    if distills and distillation.teacher is None:
        yield "train.distillation.teacher is required: the folder, hub id or run of the model that is learned from"
    for key, field in type(distillation).model_fields.items():
        if not distills and getattr(distillation, key) != field.default:
            yield f"train.distillation.{key}: goes with train.objective: distill; set that, or leave the key out"


def _policy_disagreements(train: OptimizationConfig) -> Iterator[str]:
    policy = train.policy
    changed = [key for key, field in type(policy).model_fields.items() if getattr(policy, key) != field.default]
    if train.objective != "grpo":
        for key in changed:
            yield f"train.policy.{key}: goes with train.objective: grpo, and that is {train.objective}; leave it out"
        return
    if policy.answer_length is not None and policy.loss_type != "dr_grpo":
        yield f"train.policy.answer_length: goes with loss_type: dr_grpo, and that is {policy.loss_type}; leave it out"
    low, high = policy.correction_min, policy.correction_max
    if policy.correction is None:
        for key in changed:
            if key.startswith("correction"):
                yield f"train.policy.{key}: goes with train.policy.correction, which is null; set that, or leave it out"
    elif low is None and high is None:
        yield f"train.policy.correction: {policy.correction} has no bound; set train.policy.correction_max"
    elif low is not None and high is not None and low >= high:
        yield f"train.policy.correction_min: {low:g} is not less than correction_max: {high:g}"


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
