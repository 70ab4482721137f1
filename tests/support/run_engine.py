"""Runs the engine in one process, for tests of the engine: real streamer, slots, shards and updates, no Ray."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.config.train_groups import LoraConfig
from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.attention import Attention
from megatrain_ray.engine.model.images import TOWER
from megatrain_ray.engine.model.lora import AdaptedFactory
from megatrain_ray.engine.model.micro_batch import micro_batches_of
from megatrain_ray.engine.model.structure import ModelFactory, ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy, LayerPlan, Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.memory.spill_bytes import with_spilled
from megatrain_ray.engine.planner.request import Candidate, Machine, Request
from megatrain_ray.engine.shards.device_shard import DeviceShard
from megatrain_ray.engine.step.build_engine import build_engine
from megatrain_ray.engine.step.engine import Engine
from megatrain_ray.engine.step.sampler import Completion, Prompt, SamplingParams
from megatrain_ray.engine.step.step_data import StepReport
from megatrain_ray.engine.step.warm_up import WarmUpShapes
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.storage.blob_store import BlobStore
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.model.open_model import open_model
from megatrain_ray.virtual_clock import CostModel, Record, Timeline, unit_cost
from megatrain_ray.workers.gpu_steps import objective_of_batch
from tests.support.candidate_plans import build_plan
from tests.support.host_state import HostState, blob_in_memory
from tests.support.local_host import LocalHost
from tests.support.recipes import adamw_constants, lora_of, muon_of, objective_of, rules_of, schedule, step_input
from tests.support.reference import Recipe
from tests.support.shared_trials import trials_of

MACHINE = Machine(device="cpu", num_cpus=2, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=None)


@dataclass(frozen=True)
class Mode:
    """Describes how a step runs. What its numbers depend on is in the Recipe."""

    order: LoopOrder = LoopOrder.MICRO_BATCHES_OUTER
    activations: ActivationPolicy = ActivationPolicy.KEEP
    num_shards: int = 1
    num_fragments: int = 1
    num_block_slots: int = 2
    num_edge_slots: int = 2
    sums: Tier = Tier.HBM
    gradients: Tier = Tier.HOST
    num_waiting: int = 0
    boundaries: Tier = Tier.HBM
    segment: int = 1
    kept: Tier = Tier.HBM
    num_staying: int = 0  # blocks at the end whose kept activations stay on the device whatever `kept` says
    packed_attention: Attention = Attention.SDPA
    hbm_layers: frozenset[int] = frozenset()
    activation_budget: float | None = None  # of compiled layers; None: none is compiled
    captured: bool = False
    mlp_chunk_tokens: int = 0  # 0: MLPs take all tokens at once
    spilled: frozenset[int] = frozenset()  # layers whose state is on disk and passes through two slots
    stored: frozenset[int] = frozenset()  # layers whose gradients wait on disk, and pass through the same slots
    on_disk: frozenset[int] = frozenset()  # layers of `spilled` whose working copies are on disk, too
    packed: bool = False  # blocks of floats are compressed on disk
    to_disk: frozenset[int] = frozenset()  # layers whose activations go to disk, of those whose activations leave
    num_windows: int = 3  # staging buffers of activations on disk
    window_bytes: int = 4096
    block_parts: int = 1  # into which blocks are divided, at most
    vision: str = "frozen"  # train.vision
    num_updated_late: int = 0
    poison: bool = True


@dataclass
class EngineResult:
    """Holds what a run left behind, and what it did."""

    plan: Plan
    layout: ModelLayout
    reports: list[StepReport] = field(default_factory=list)
    masters: dict[str, Tensor] = field(default_factory=dict)
    frozen: dict[str, Tensor] = field(default_factory=dict)
    exp_avg: dict[str, Tensor] = field(default_factory=dict)
    exp_avg_sq: dict[str, Tensor] = field(default_factory=dict)
    records: list[tuple[Record, ...]] = field(default_factory=list)
    device_bytes: int = 0
    evaluations: list[float] = field(default_factory=list)  # mean of the held-out batches, before and after every step
    logprobs: list[Tensor] = field(default_factory=list)  # of all targets of the held-out batches, just as often
    sampled: list[list[Completion]] = field(default_factory=list)  # of the prompts, just as often

    @property
    def losses(self) -> list[float]:
        return [r.loss for r in self.reports]

    @property
    def grad_norms(self) -> list[float]:
        return [r.grad_norm for r in self.reports]

    def count(self, *names: str) -> int:
        """Return the number of operations of these names in all steps."""
        return sum(record.op.name in names for records in self.records for record in records)

    def moved(self, name: str) -> int:
        """Return the bytes that operations of this name moved in all steps."""
        return sum(r.op.num_bytes for records in self.records for r in records if r.op.name == name)


def folder_source(folder: Path, *, trust_remote_code: bool = False) -> ModelSource:
    return open_model(ModelConfig(path=str(folder), trust_remote_code=trust_remote_code))


def plan_for(factory: ModelFactory, recipe: Recipe, mode: Mode, batch: tuple[int, int]) -> tuple[ModelStructure, Plan]:
    """Return the plan of one mode: the test chooses the candidate, and the product does everything else.

    batch: number of sequences, and their length.
    """
    request = _request_of(recipe, mode, batch)
    rules, trained = rules_of(recipe, has_pairs=isinstance(factory, AdaptedFactory)), mode.vision != "frozen"
    if mode.vision == "projector":
        rules = dataclasses.replace(rules, freeze=(*rules.freeze, TOWER))
    structure, activations = discover(
        factory,
        request.precision.working_dtype,
        recipe.micro_batch_size,
        request.seq_len,
        rules,
        compiled=request.compiled,
        chunked=mode.mlp_chunk_tokens > 0,
        block_parts=mode.block_parts,
        images=trained,
        tower=trained,
        packed=trained,
        trials=trials_of(factory, rules),
    )
    if mode.mlp_chunk_tokens:
        activations = activations.in_chunks() or activations
    candidate = _candidate_of(mode, len(structure.layers) - 2)
    plan = build_plan(structure, activations, MACHINE, request, candidate)
    return structure, _with_chosen(plan, recipe, mode, structure.layout(mode.num_fragments))


def _request_of(recipe: Recipe, mode: Mode, batch: tuple[int, int]) -> Request:
    num_sequences, seq_len = batch
    return Request(
        precision=Precision.of(recipe.precision, recipe.moments),
        round_gradients=recipe.grad_dtype == "bf16",
        clip=recipe.clip is not None,
        micro_batch_size=recipe.micro_batch_size,
        num_micro_batches=num_sequences // recipe.micro_batch_size,
        seq_len=seq_len,
        num_shards=mode.num_shards,
        num_fragments=mode.num_fragments,
        packed_attention=mode.packed_attention,
        compiled=mode.activation_budget is not None,
        mlp_chunk_tokens=mode.mlp_chunk_tokens,
    )


def _candidate_of(mode: Mode, num_blocks: int) -> Candidate:
    budget = mode.activation_budget or 0.0
    return Candidate(
        order=mode.order,
        activations=mode.activations,
        num_block_slots=mode.num_block_slots,
        num_edge_slots=mode.num_edge_slots,
        sums=mode.sums,
        gradients=mode.gradients,
        num_waiting=mode.num_waiting,
        boundaries=mode.boundaries,
        segment=mode.segment,
        hbm_layers=mode.hbm_layers,
        activation_budget=budget,
        num_tail_blocks=mode.num_staying,
        tail_budget=budget,
        kept=mode.kept,
        num_offloading=0 if mode.kept is Tier.HBM else num_blocks,
        num_updated_late=mode.num_updated_late,
    )


def _with_chosen(plan: Plan, recipe: Recipe, mode: Mode, layout: ModelLayout) -> Plan:
    """Return the plan with what no candidate chooses: chunks of the loss, and what is on disk."""
    replace = dataclasses.replace
    compute, disk, gradients = replace(plan.compute, num_threads=recipe.num_threads), plan.disk, plan.gradients
    if recipe.loss_chunk_tokens:
        compute = replace(compute, loss_chunk_tokens=recipe.loss_chunk_tokens)
    if mode.spilled | mode.stored:
        plan = with_spilled(plan, tuple(_on_disk(plan, mode)), layout)
        disk, gradients = replace(plan.disk, num_state_slots=2, extent_elements=1 << 13), plan.gradients
    if mode.to_disk:
        plan = replace(plan, layers=tuple(_with_activations_on_disk(plan, mode)))
        disk = replace(
            disk,
            num_staging_buffers=mode.num_windows,
            staging_buffer_bytes=mode.window_bytes,
        )
    if mode.stored:
        sizes = layout.gradient_bytes(gradients.offload_dtype.itemsize, mode.hbm_layers)
        staying = sum(size for i, size in enumerate(sizes) if i not in plan.slab_transit_layers)
        gradients = replace(gradients, slab_bytes=staying + max(sizes[i] for i in plan.slab_transit_layers))
    step = replace(plan.step, captured=mode.captured)
    disk = replace(disk, packed=mode.packed)
    return replace(plan, step=step, compute=compute, disk=disk, gradients=gradients)


def _on_disk(plan: Plan, mode: Mode) -> Iterator[LayerPlan]:
    for i, layer in enumerate(plan.layers):
        state = Tier.NVME if i in mode.spilled else layer.state
        gradients = Tier.NVME if i in mode.stored else layer.gradients
        weights = Tier.NVME if i in mode.on_disk else layer.weights
        yield dataclasses.replace(layer, state=state, gradients=gradients, weights=weights)


def _with_activations_on_disk(plan: Plan, mode: Mode) -> Iterator[LayerPlan]:
    for i, layer in enumerate(plan.layers):
        moved = {kind: Tier.NVME for kind in ("boundary", "kept") if getattr(layer, kind) is Tier.HOST}
        yield dataclasses.replace(layer, **moved) if i in mode.to_disk else layer


def train_engine(
    folder: Path,
    batches: Iterable[Batch],
    recipe: Recipe,
    mode: Mode,
    *,
    cost: CostModel = unit_cost,
    make_device: Callable[[Timeline, int], Device] = lambda timeline, threads: CpuDevice(timeline, threads),
    trust_remote_code: bool = False,
    held_out: Sequence[Batch] = (),
    prompts: Sequence[Prompt] = (),
    sampling: SamplingParams | None = None,
    lora: LoraConfig | None = None,
    disk: Callable[[int], tuple[BlobStore, str]] = lambda num_bytes: (blob_in_memory(num_bytes), "spill"),
) -> EngineResult:
    """Train the model of `folder` through the engine, on one batch an update.

    lora: pairs, if they are not those of the recipe's adapter.
    disk: returns store and name of a blob of so many bytes, where activations wait.
    """
    batches = list(batches)
    source = folder_source(folder, trust_remote_code=trust_remote_code).with_lora(lora or lora_of(recipe))
    source = dataclasses.replace(source, expert_groups=mode.block_parts, fp8=recipe.compute == "fp8")
    first = [*batches, *held_out][0]
    num_rows, columns = first.input_ids.shape
    shape = num_rows // first.row_parts, columns * first.row_parts
    structure, plan = plan_for(source.factory, recipe, mode, shape)
    state = HostState(structure.layout(mode.num_fragments), plan, recipe)
    state.load(source.weights())

    async def train() -> EngineResult:
        timeline = Timeline(cost)
        device = make_device(timeline, recipe.num_threads)
        weights = state.disk_weights(poison=mode.poison) if plan.weights_on_disk else None
        host = LocalHost(plan, state.layout, state.working, state.shards, timeline, disk=weights)
        if plan.hbm_layers:
            state.device_shard = DeviceShard(plan, state.layout, device, adamw_constants(recipe))
            state.device_shard.load(source.weights())
        spill = disk(plan.activation_file_bytes) if plan.disk_activations else None
        engine = build_engine(
            source.factory, structure, plan, device, host,
            muon=muon_of(recipe), device_shard=state.device_shard, spill=spill, poison=mode.poison,
        )  # fmt: skip
        result = EngineResult(plan, state.layout)
        training = Training(engine, host, timeline, recipe, result, prompts, sampling, source.weights())
        return await training.run(batches, held_out)

    try:
        result = asyncio.run(train())
        result.masters = state.named(state.masters())
        result.frozen = state.frozen()
        result.exp_avg = state.named(state.whole("m"))
        result.exp_avg_sq = state.second_moments()
    finally:
        for shard in state.shards:
            shard.close()
    return result


@dataclass(frozen=True)
class Training:
    """Holds an engine and its host for as long as a training lasts, and the result that it fills.

    weights: that the training began with, to be compared with; None: nothing is.
    """

    engine: Engine
    host: LocalHost
    timeline: Timeline
    recipe: Recipe
    result: EngineResult
    prompts: Sequence[Prompt] = ()
    sampling: SamplingParams | None = None
    weights: WeightSource | None = None

    async def run(self, batches: Sequence[Batch], held_out: Sequence[Batch]) -> EngineResult:
        try:
            objective = objective_of(self.recipe)
            packed = any(batch.positions is not None for batch in batches)
            weighted = any(batch.loss_weights is not None for batch in batches)
            await self.engine.run_warm_up(
                WarmUpShapes(
                    objective,
                    packed,
                    weighted,
                    evaluates=bool(held_out or self.recipe.kto),
                    trains=bool(batches),
                    images=any(batch.images for batch in batches),
                )
            )
            await self._evaluate(held_out, 0)
            for step, batch in enumerate(batches, 1):
                await self._step(step, batch)
                if step == len(batches):
                    await self.engine.drain(step)
                self.result.records.append(self.timeline.records)
                self.timeline.clear()
                await self._evaluate(held_out, step)
            if held_out and self.weights:
                cut = [micro_batches_of(batch, self.recipe.micro_batch_size) for batch in held_out]
                found = [await self.engine.reference_logprobs(micro_batches, self.weights) for micro_batches in cut]
                assert torch.equal(torch.cat(found), self.result.logprobs[0]), "as the model before the training"
            self.result.device_bytes = self.engine.device.memory().reserved_bytes
        finally:
            await self.host.close()
            await self.engine.close()
        return self.result

    async def _step(self, step: int, batch: Batch) -> None:
        adam_step = 1 + sum(not report.skipped for report in self.result.reports)
        params = schedule(step, adam_step, self.recipe)
        inputs = step_input(step, batch, self.recipe)
        divided = partial(micro_batches_of, size=self.recipe.micro_batch_size)
        objective = await objective_of_batch(self.engine, inputs.objective, batch, step - 1, divided)
        inputs = replace(inputs, objective=objective)
        self.result.reports.append(await self.engine.step(inputs, params, self.recipe.clip))

    async def _evaluate(self, batches: Sequence[Batch], generation: int) -> None:
        if self.sampling:
            self.result.sampled.append(await self.engine.sample(self.prompts, self.sampling, generation))
        if not batches:
            return
        cut = [micro_batches_of(batch, self.recipe.micro_batch_size) for batch in batches]
        parts = [(await self.engine.evaluate(micro_batches, generation))[0] for micro_batches in cut]
        self.result.evaluations.append(sum(parts) / sum(batch.total_weight for batch in batches))
        self.result.logprobs.append(
            torch.cat([await self.engine.logprobs(micro_batches, generation) for micro_batches in cut])
        )
        assert self.engine.device.take_exposed() == {}, "no step waited for what an evaluation waited for"
        self.timeline.clear()
