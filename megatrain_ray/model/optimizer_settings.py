"""Translates a configuration for the engine's optimizers: which parameters they train, and with what constants."""

from __future__ import annotations

import re

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.train_groups import OptimizationConfig
from megatrain_ray.engine.layout.flat_layout import ParameterGroup
from megatrain_ray.engine.model.images import TOWER
from megatrain_ray.engine.model.lora import LoraRules
from megatrain_ray.engine.model.parameter_rules import GroupRule, ParameterRules
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
