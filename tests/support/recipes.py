"""Translates a recipe of the reference into settings of the engine."""

from __future__ import annotations

import json
import re

from megatrain_ray.config.train_groups import LoraConfig
from megatrain_ray.engine.layout.flat_layout import ParameterGroup
from megatrain_ray.engine.model.chunked_loss import Objective
from megatrain_ray.engine.model.lora import LoraRules
from megatrain_ray.engine.model.micro_batch import micro_batches_of
from megatrain_ray.engine.model.parameter_rules import GroupRule, ParameterRules
from megatrain_ray.engine.objectives.distillation import Distillation, Softmax
from megatrain_ray.engine.objectives.kto_objective import KtoObjective
from megatrain_ray.engine.objectives.logprob_objective import LogprobObjective
from megatrain_ray.engine.objectives.pair_objective import PairObjective
from megatrain_ray.engine.objectives.policy_objective import PolicyObjective
from megatrain_ray.engine.objectives.reward_objective import RewardObjective
from megatrain_ray.engine.optimizer.adamw import AdamWConstants, UpdateParams, learning_rate
from megatrain_ray.engine.optimizer.muon import LrAdjustment, Muon
from megatrain_ray.engine.step.step_data import StepInput
from megatrain_ray.io.batching.batch import Batch
from tests.support.reference import Recipe
from tests.support.tiny import VOCAB_SIZE


def rules_of(recipe: Recipe, *, has_pairs: bool) -> ParameterRules:
    groups = (
        GroupRule((g.match,), ParameterGroup(True, (g.lr or recipe.lr) / recipe.lr, g.weight_decay, g.muon))
        for g in recipe.groups
    )
    kind = LoraRules if has_pairs else ParameterRules
    return kind(recipe.trainable, recipe.freeze, tuple(groups), recipe.muon is not None)


def lora_of(recipe: Recipe) -> LoraConfig | None:
    """Return the settings that continue from the recipe's adapter, or None if it has none."""
    if recipe.adapter is None:
        return None
    theirs = json.loads((recipe.adapter / "adapter_config.json").read_text())
    return LoraConfig(
        match=tuple(rf"(^|\.){re.escape(name)}$" for name in theirs["target_modules"]),
        rank=theirs["r"],
        alpha=theirs["lora_alpha"],
        dropout=theirs["lora_dropout"],
        path=str(recipe.adapter),
    )


def muon_of(recipe: Recipe) -> Muon | None:
    theirs = recipe.muon
    if theirs is None:
        return None
    return Muon(theirs.momentum, theirs.nesterov, theirs.ns_steps, LrAdjustment(theirs.adjust_lr))


def adamw_constants(recipe: Recipe) -> AdamWConstants:
    seed = recipe.seed if recipe.moments == "bf16" else None
    return AdamWConstants(*recipe.betas, recipe.eps, recipe.weight_decay, muon_of(recipe), seed)


def step_input(step: int, batch: Batch, recipe: Recipe) -> StepInput:
    micro_batches = micro_batches_of(batch, recipe.micro_batch_size)
    return StepInput(step, micro_batches, batch.total_weight, recipe.seed, objective_of(recipe), batch.counts)


def objective_of(recipe: Recipe) -> Objective:
    distil = recipe.distil
    distillation = distil and Distillation(Softmax(distil.temperature, VOCAB_SIZE), distil.beta, distil.sft_weight)
    return Objective(recipe.z_loss, recipe.label_smoothing, _logprob_objective(recipe), distillation)


def _logprob_objective(recipe: Recipe) -> LogprobObjective | None:
    preference = recipe.preference
    if recipe.policy is not None:
        return PolicyObjective(*recipe.policy)  # type: ignore[arg-type]
    if recipe.kto:
        return KtoObjective(*recipe.kto)  # type: ignore[arg-type]
    if preference is None:
        return None
    *numbers, centering = preference
    return RewardObjective(centering) if preference.kind == "reward" else PairObjective(*numbers)  # type: ignore[arg-type]


def schedule(step: int, adam_step: int, recipe: Recipe) -> UpdateParams:
    lr = learning_rate(
        step,
        peak=recipe.lr,
        min_lr=recipe.min_lr,
        steps=recipe.steps,
        warmup_steps=recipe.warmup_steps,
        schedule=recipe.schedule,  # type: ignore[arg-type]
    )
    return UpdateParams(step, adam_step, lr)
