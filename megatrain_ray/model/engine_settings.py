"""Translates a configuration for the engine: what is minimised, which parameters are trained, by which constants."""

from __future__ import annotations

import re

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.train_groups import OptimizationConfig
from megatrain_ray.engine.layout.flat_layout import ParameterGroup
from megatrain_ray.engine.model.chunked_loss import Objective
from megatrain_ray.engine.model.images import TOWER
from megatrain_ray.engine.model.lora import LoraRules
from megatrain_ray.engine.model.parameter_rules import GroupRule, ParameterRules
from megatrain_ray.engine.objectives.distillation import Distillation, TopTokens
from megatrain_ray.engine.objectives.kto_objective import KtoObjective
from megatrain_ray.engine.objectives.logprob_objective import LogprobObjective
from megatrain_ray.engine.objectives.pair_objective import PairObjective
from megatrain_ray.engine.objectives.policy_objective import PolicyObjective
from megatrain_ray.engine.objectives.reward_objective import RewardObjective
from megatrain_ray.engine.optimizer.adamw import AdamWConstants
from megatrain_ray.engine.optimizer.muon import LrAdjustment, Muon
from megatrain_ray.model.architecture import REWARD_HEAD


def rules_of(config: TrainConfig) -> ParameterRules:
    """Return which parameters are trained, and in which groups.

    A group's own learning rate is its peak: it follows the schedule of the run in proportion.
    """
    train = config.train
    groups = (
        GroupRule(
            group.match,
            ParameterGroup(
                True,
                (group.lr or train.lr) / train.lr,
                group.weight_decay,
                None if group.optimizer is None else group.optimizer == "muon",
            ),
        )
        for group in train.groups
    )
    freeze = (*train.freeze, TOWER) if train.vision == "projector" else train.freeze
    rest = freeze, tuple(groups), train.optimizer == "muon"
    if config.lora is None:
        return ParameterRules(train.trainable, *rest)
    head = (f"^{re.escape(REWARD_HEAD)}$",) if train.objective == "reward" else ()  # it is new, and no pair suits it
    return LoraRules((*train.trainable, *head), *rest)


def muon_of(train: OptimizationConfig) -> Muon | None:
    """Return Muon's constants, or None if Muon trains nothing."""
    if train.optimizer != "muon":
        return None
    muon = train.muon
    return Muon(muon.momentum, muon.nesterov, muon.ns_steps, LrAdjustment(muon.adjust_lr))


def adamw_constants(train: OptimizationConfig) -> AdamWConstants:
    """Return the constants that all optimizer updates of the run use."""
    seed = train.seed if train.moments == "bf16" else None
    return AdamWConstants(train.betas[0], train.betas[1], train.eps, train.weight_decay, muon_of(train), seed)


def objective_of(config: TrainConfig, teacher: TopTokens | None) -> Objective:
    """Return what is minimised. `teacher`: what of a teacher's predictions is recorded; None: there is no teacher."""
    train = config.train
    if train.objective == "distill":
        assert teacher is not None  # the run has found it
        numbers = train.distillation
        return Objective(distillation=Distillation(teacher.softmax, numbers.beta, numbers.sft_weight))
    return Objective(train.z_loss, train.label_smoothing, _logprob_objective(train, config.data.seq_len))


def _logprob_objective(train: OptimizationConfig, seq_len: int) -> LogprobObjective | None:
    numbers, policy = train.preference.model_dump(), train.policy.model_dump()
    centering = numbers.pop("center_rewards_coefficient")
    weights = numbers.pop("desirable_weight"), numbers.pop("undesirable_weight")
    match train.objective:
        case "sft" | "distill":
            return None
        case "reward":
            return RewardObjective(centering)
        case "kto" | "apo_zero_unpaired" as kind:
            return KtoObjective(kind, train.preference.beta, *weights)
        case "grpo":
            return PolicyObjective(**policy | {"answer_length": policy["answer_length"] or seq_len})
        case kind:
            return PairObjective(kind, **numbers)
