"""Runs a plan on a machine that nobody here has, as far as its clocks go.

The engine runs a plan that was made for that machine, on a stand-in of the model with as many layers of next to no
width. On the virtual clock every operation takes what it would take there.

What the plan decides is kept: where each layer lives, slots, loop order, micro-batches, where gradients and inputs of
layers wait. Bytes are the stand-in's, but on the clock each operation moves what the layer's would be. The disk is only
on the clock, by the rules that predict it (SimulatedSpill): nothing here shows whether these hold.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.model.flops import work_of
from megatrain_ray.engine.model.structure import ModelStructure, build_empty
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.op_costs import Prices
from megatrain_ray.engine.planner.cost.simulated_buffers import SimulatedSlab, SimulatedSpill, SimulatedUploadBuffers
from megatrain_ray.engine.planner.memory.spill_bytes import with_spilled
from megatrain_ray.engine.planner.request import Candidate
from megatrain_ray.engine.planner.search.make_plan import activations_of
from megatrain_ray.engine.shards.device_shard import DeviceShard
from megatrain_ray.engine.step.build_engine import build_engine
from megatrain_ray.engine.weights.weight_source import RandomSource
from megatrain_ray.planning.run_spec import PlanningProblem
from megatrain_ray.virtual_clock import CostModel, Op, Record, Stage, Timeline
from tests.support.candidate_plans import build_plan
from tests.support.host_state import HostState
from tests.support.local_host import LocalHost
from tests.support.recipes import adamw_constants
from tests.support.reference import Recipe
from tests.support.run_engine import MACHINE, EngineResult, Training
from tests.support.shapes import FOUND_LAYERS, deepened
from tests.support.tiny import text_batches

SEQ = 8
VOCAB = 1024  # ends are larger than blocks, as those of large models are


@dataclass(frozen=True)
class StandIn:
    """Runs a stand-in of the model. `question` and `plan` are those of the model and the machine that are not here."""

    question: PlanningProblem
    plan: Plan

    def records(self, num_steps: int) -> list[tuple[Record, ...]]:
        """Return what the engine did in each of `num_steps` steps, and when."""
        return asyncio.run(self._train(num_steps)).records

    async def _train(self, num_steps: int) -> EngineResult:
        plan, factory = self.plan, partial(_model, len(self.plan.layers) - 2)
        # A trial of all layers takes longer than the steps.
        found = discover(partial(_model, FOUND_LAYERS), plan.precision.working_dtype, 1, SEQ)
        structure, activations = deepened(*found, len(plan.layers) - 2)
        plan = self._plan(structure, activations)
        recipe = self._recipe(num_steps)
        state, source = (
            HostState(structure.layout(), plan, recipe),
            RandomSource(build_empty(factory, torch.float32), 0),
        )
        state.load(source)
        timeline = Timeline(self._cost(structure.layout(), plan))
        device = CpuDevice(timeline, recipe.num_threads)
        host = LocalHost(plan, state.layout, state.working, state.shards, timeline)
        # State is in memory; the clock counts transfers as if it were where the plan has it.
        host._spill = SimulatedSpill(
            self.plan, self._layout, lambda stage, op, *after_s: timeline.account(stage, op, after_s)
        )
        host._windows = SimulatedUploadBuffers(
            self.plan, self._layout, lambda stage, op, *after_s: timeline.account(stage, op, after_s)
        )
        host._room = SimulatedSlab(self.plan, self._layout)
        if plan.hbm_layers:
            state.device_shard = DeviceShard(plan, state.layout, device, adamw_constants(recipe))
            state.device_shard.load(source)
        engine = build_engine(factory, structure, plan, device, host, device_shard=state.device_shard)
        batches = text_batches(num_steps, plan.step.micro_batch_size * plan.step.num_micro_batches, SEQ)
        result = await Training(engine, host, timeline, recipe, EngineResult(plan, state.layout)).run(batches, ())
        for shard in state.shards:
            shard.close()
        return result

    def _recipe(self, num_steps: int) -> Recipe:
        request = self.question.request
        return Recipe(
            num_steps,
            micro_batch_size=1,
            precision=request.precision.compute,
            clip=1.0 if request.clip else None,
            grad_dtype="bf16" if request.round_gradients else "fp32",
        )

    def _plan(self, structure: ModelStructure, activations: ActivationBytes) -> Plan:
        """Return a plan of the stand-in with the decisions of the real plan."""
        plan = self.plan
        request = replace(
            self.question.request,
            micro_batch_size=1,
            num_micro_batches=plan.step.num_micro_batches,
            seq_len=SEQ,
            saves=False,
            compiled=False,
            num_shards=1,
        )
        groups = Counter(slot.group for slot in plan.slots.weights)
        candidate = Candidate(
            plan.step.order,
            ActivationPolicy.KEEP,
            groups.total() - groups["edge"],
            groups["edge"],
            plan.gradients.sums,
            num_waiting=len(plan.deferred_offload_layers),
            hbm_layers=plan.hbm_layers,
        )
        small = build_plan(structure, activations, MACHINE, request, candidate)
        layers = tuple(
            replace(layer, boundary=of_plan.boundary, activations=of_plan.activations, gradients=of_plan.gradients)
            for layer, of_plan in zip(small.layers, plan.layers, strict=True)
        )
        return replace(
            with_spilled(small, layers, structure.layout()),
            compute=replace(with_spilled(small, layers, structure.layout()).compute, num_threads=1),
        )

    def _cost(self, layout: ModelLayout, plan: Plan) -> CostModel:
        """Return the seconds that an operation of the stand-in takes there. `layout`, `plan`: of the stand-in."""
        prices, big = self._prices, self._layout
        gradients = [(x.trained.size, y.trained.size) for x, y in zip(big.layers, layout.layers, strict=True)]
        weights = [(x.size, y.size) for x, y in zip(big.layers, layout.layers, strict=True)]
        entering = [(x.boundary_bytes, y.boundary_bytes) for x, y in zip(self.plan.layers, plan.layers, strict=True)]
        sizes = {"load": weights, "offload": gradients, "fetch": gradients, "boundary": entering}

        def cost(stage: Stage, op: Op) -> float:
            if op.name in sizes:
                there, here = sizes[op.name][op.layer]
                op = replace(op, num_bytes=op.num_bytes * there // here)
            return prices(stage, op)

        return cost

    @cached_property
    def _prices(self) -> Prices:
        question, plan = self.question, self.plan
        request, machine = question.request, question.machine
        work = work_of(question.structure, request.active_experts, request.sliding_windows)
        disk = machine.spill.bytes_per_s if machine.spill else math.inf
        basis = CostBasis(
            question.structure,
            self._layout,
            work,
            machine.rates,
            machine.profile is not None,
            request.objective.per_logit,
            disk,
        )
        return Prices(plan, basis, activations_of(plan, question.activations, request))

    @cached_property
    def _layout(self) -> ModelLayout:
        return self.question.structure.layout()


def _model(num_blocks: int, dtype: torch.dtype) -> nn.Module:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=num_blocks, num_attention_heads=2, vocab_size=VOCAB,
        tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype)
