"""From a TrainConfig to a Plan: what a run would do, without doing any of it."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain_ray.config import OptimizationConfig, TrainConfig
from megatrain_ray.engine.model import LayerKind, ModelStructure
from megatrain_ray.engine.parameter_group import ParameterGroup
from megatrain_ray.engine.parameter_rules import GroupRule, ParameterRules
from megatrain_ray.engine.plan import Plan, Precision
from megatrain_ray.engine.plan_request import Machine, Request
from megatrain_ray.engine.planner import make_plan
from megatrain_ray.engine.structure import discover
from megatrain_ray.errors import ConfigError
from megatrain_ray.machine import probe_machine
from megatrain_ray.model_source import ModelSource, open_model


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before the first process starts. Picklable: actors get it whole."""

    config: TrainConfig
    source: ModelSource
    structure: ModelStructure
    plan: Plan


def plan_config(config: TrainConfig) -> Plan:
    """What `megatrain plan` shows: of the model's configuration alone, without weights, data or a GPU.

    Raises ConfigError and CapacityError as training would.
    """
    hardware = config.hardware
    machine = probe_machine(hardware.device, hardware.hbm_limit, hardware.ram_limit, imagined=True)
    return prepare(config, machine).plan


def prepare(config: TrainConfig, machine: Machine | None = None) -> Prepared:
    """`machine`: another one than this."""
    source = open_model(config.model)
    positions = source.max_positions
    if positions is not None and config.data.seq_len > positions:
        raise ConfigError(
            f"data.seq_len: {config.data.seq_len} is more than the model's {positions} positions "
            "(max_position_embeddings); lower it"
        )
    hardware = config.hardware
    machine = machine or probe_machine(hardware.device, hardware.hbm_limit, hardware.ram_limit)
    micro_batch_size, num_micro_batches = config.split()
    precision = Precision(config.train.precision)
    structure, activations = discover(
        source.factory, precision.working_dtype, micro_batch_size, config.data.seq_len, _rules(config.train)
    )
    request = Request(
        precision=precision,
        round_gradients=config.train.grad_dtype == "bf16",
        clip=config.train.clip is not None,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        seq_len=config.data.seq_len,
        num_shards=hardware.num_shards,
        saves=bool(config.save_every),
        z_loss=config.train.z_loss > 0,
    )
    return Prepared(config, source, structure, make_plan(structure, activations, machine, request))


def _rules(train: OptimizationConfig) -> ParameterRules:
    """A group's own learning rate is its peak: it follows the schedule of the run in proportion."""
    groups = (
        GroupRule(group.match, ParameterGroup(True, (group.lr or train.lr) / train.lr, group.weight_decay))
        for group in train.groups
    )
    return ParameterRules(train.trainable, train.freeze, tuple(groups))


@dataclass(frozen=True)
class FlopCount:
    """Model FLOPs of a step: 6 N_matmul tokens + 6 L d_attn Σ len² (causal attention counted once; forward and
    backward; recomputation and pads are not counted). Where something is frozen a third of a matrix's goes with its
    gradient, and layers below the lowest trained one have a forward only."""

    of_token: int
    of_pair: int  # of two tokens of a document

    @staticmethod
    def of(structure: ModelStructure, source: ModelSource) -> FlopCount:
        """Matrices of blocks and head, a tied head included; the input embedding is a lookup, not a product."""
        lowest = structure.lowest_trained
        of_token = sum(
            p.shape[0] * p.shape[1] * (2 + 2 * (i >= lowest) + 2 * p.group.trained)
            for i, layer in enumerate(structure.layers)
            if layer.kind is not LayerKind.EMBEDDING
            for p in layer.parameters
            if len(p.shape) == 2
        )
        passes = sum(
            3 if i >= lowest else 1 for i, layer in enumerate(structure.layers) if layer.kind is LayerKind.BLOCK
        )
        heads = int(source.setting("num_attention_heads") or 0)
        hidden = int(source.setting("hidden_size") or 0)
        head_dim = int(source.setting("head_dim") or hidden // max(1, heads))
        return FlopCount(of_token, 2 * passes * heads * head_dim)

    def per_step(self, num_tokens: int, sum_squared_lengths: int) -> float:
        return float(self.of_token) * num_tokens + float(self.of_pair) * sum_squared_lengths
