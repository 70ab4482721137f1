"""Finds a model's structure as a run uses it: with the attention and compiled layers that its settings give."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NamedTuple

import torch

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.discover import Trials, discover
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.model.attention import Attention, flex_problem
from megatrain_ray.engine.model.parameter_rules import ParameterRules
from megatrain_ray.engine.model.structure import ModelStructure, build_empty
from megatrain_ray.engine.planner.memory.chunk_sizes import may_chunk
from megatrain_ray.errors import ConfigError
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.model.optimizer_settings import rules_of
from megatrain_ray.model.trial_cache import TrialCache

log = logging.getLogger(__name__)


def compiles(config: TrainConfig, device: str) -> bool:
    """Return whether layers are compiled, as hardware.compile and the device decide."""
    setting = config.hardware.compile
    return setting if setting != "auto" else device == "cuda" and not config.train.deterministic


class Discovery(NamedTuple):
    """Holds a model's structure, its activation bytes per micro-batch, and the attention that its layers use.

    attention: for steps whose rows hold one document each.
    packed_attention: for steps whose rows hold several documents.
    """

    structure: ModelStructure
    activations: ActivationBytes
    attention: Attention
    packed_attention: Attention


def discover_with_attention(
    config: TrainConfig, source: ModelSource, device: str, *, compiled: bool, block_parts: int, trials: Trials
) -> Discovery:
    """Run `discover` with the attention that the settings and the device allow.

    The longer a row is, the more its attention masks cost, so flex attention replaces them where it can.
    """
    (size, number), seq_len, packed = config.split(), config.data.seq_len, config.data.packing
    shape = Precision(config.train.precision).working_dtype, size, seq_len
    tokens = size * seq_len * (number if config.train.split_is_free else 1)  # upper bound for a micro-batch
    chunked = may_chunk(tokens, seq_len, has_disk=config.spill.path is not None)
    find = partial(_find, source, shape, rules_of(config), trials, chunked=chunked, block_parts=block_parts)
    sdpa, flex = Attention.SDPA, Attention.FLEX
    if not _may_use_flex(config, source, device):
        return Discovery(*find(packed=packed, compiled=compiled), sdpa, sdpa)
    if packed:
        _, activations = find()
        unpacked = flex if activations.masks else sdpa
        return Discovery(*find(attention=flex, packed=True, compiled=compiled), unpacked, flex)
    structure, activations = find(compiled=compiled)
    if activations.masks:
        return Discovery(*find(attention=flex, compiled=compiled), flex, flex)
    return Discovery(structure, activations, sdpa, sdpa)


def _find(
    source: ModelSource,
    shape: tuple[torch.dtype, int, int],
    rules: ParameterRules,
    trials: Trials,
    *,
    attention: Attention = Attention.SDPA,
    packed: bool = False,
    compiled: bool = False,
    chunked: bool = False,
    block_parts: int = 1,
) -> tuple[ModelStructure, ActivationBytes]:
    """Run `discover`, taking the trials of compiled layers from the cache if it has them."""
    how: dict[str, Any] = {"attention": attention, "packed": packed, "chunked": chunked}
    if not compiled or block_parts > 1:
        return discover(source.factory, *shape, rules, **how, block_parts=block_parts, trials=trials)
    cache = TrialCache(source, {"shape": shape, "rules": rules, **how})
    known = cache.read()
    structure, activations = discover(source.factory, *shape, rules, **how, compiled=known is None, trials=trials)
    if known is not None:
        return structure, activations.with_trials(known)
    cache.write(activations.trials)
    return structure, activations


def _may_use_flex(config: TrainConfig, source: ModelSource, device: str) -> bool:
    """Return whether flex attention can be used. Raises ConfigError if the settings demand it and it cannot."""
    setting = config.model.attention
    if setting == "sdpa" or (setting == "auto" and device != "cuda"):
        return False
    problem = flex_problem(build_empty(source.factory, torch.float32))
    if device != "cuda":
        problem = "it computes gradients on a GPU only"
    if problem is not None and setting == "flex":
        raise ConfigError(f"model.attention: flex attention is not possible here: {problem}; set model.attention: auto")
    if problem is not None:
        log.info("no flex attention: %s; rows of several documents get whole masks", problem)
    return problem is None
