"""Allocates the device memory of a plan and wires the components of its engine."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain_ray.engine.activations.activation_store import ActivationStore, held_activation_bytes
from megatrain_ray.engine.activations.disk_activations import DiskActivations
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.device.ranks import OneRank, Ranks
from megatrain_ray.engine.gradients.gradient_offloader import GradientOffloader
from megatrain_ray.engine.gradients.gradient_store import GradientStore
from megatrain_ray.engine.gradients.interfaces import StepHooks
from megatrain_ray.engine.gradients.muon_updates import MuonUpdates
from megatrain_ray.engine.host.interfaces import Host
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import ModelFactory, ModelStructure
from megatrain_ray.engine.optimizer.muon import Muon
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.shards.device_shard import DeviceGate, DeviceShard
from megatrain_ray.engine.step.captured_step import CapturedStep
from megatrain_ray.engine.step.engine import Engine
from megatrain_ray.engine.step.evaluator import Evaluator
from megatrain_ray.engine.step.sampler import Sampler
from megatrain_ray.engine.step.step_hooks import (
    DeviceUpdates,
    OffloadedActivations,
    OffloadedGradients,
    OffloadedPartialSums,
)
from megatrain_ray.engine.step.step_loss import StepLoss
from megatrain_ray.engine.step.step_runner import StepRunner
from megatrain_ray.engine.step.warm_up import WarmUp
from megatrain_ray.engine.weights_stream.bound_model import BoundModel
from megatrain_ray.engine.weights_stream.bound_weights import SlotRing
from megatrain_ray.engine.weights_stream.layer_streamer import AllResidentSource, LayerStreamer, SlotGather
from megatrain_ray.io.storage.blob_store import BlobStore


def build_engine(
    factory: ModelFactory, structure: ModelStructure, plan: Plan, device: Device, host: Host, *,
    muon: Muon | None = None, device_shard: DeviceShard | None = None, gate: DeviceGate | None = None,
    spill: tuple[BlobStore, str] | None = None, ranks: Ranks | None = None, poison: bool = False,
) -> Engine:  # fmt: skip
    """Return an engine for steps of the plan. Call it on the event loop that the engine is for.

    muon: Muon's constants, if Muon trains something.
    device_shard: weights and optimizer state of the layers that live on the device, if there are any.
    gate: tells a save about the device's updates, if those layers are saved.
    spill: store and name of a blob of `Plan.activation_file_bytes`, if the plan has activations on disk.
    ranks: the other GPU workers of the run, if there are any; each computes a part of the step.
    poison: fill released device memory with NaN, so that a use after release becomes a wrong loss.
    """
    ranks = ranks or OneRank()
    layout = structure.layout(plan.num_fragments).on_host(ranks.rank // plan.hosts.gpus_per_host, plan.hosts.num_hosts)
    memory = device.allocate(sum(slot.num_bytes for slot in plan.slots.weights))
    ring = SlotRing(memory, [slot.num_bytes for slot in plan.slots.weights], poison=poison)
    gathers = None
    if plan.slots.gathered:
        gathers = SlotGather(layout, plan.precision.working_dtype.itemsize, device, ranks, plan.update_deadline_s)
    streamer = LayerStreamer(device, ring, layout, host, plan.update_deadline_s + DEADLINE_S, gathers)
    model = BoundModel(factory, structure, layout, plan, device, memory)
    if device_shard:
        model.weights.register_resident(device_shard.memory, device_shard.regions())
    store = GradientStore(plan, layout, device, ranks, poison=poison)
    offloader = GradientOffloader(device, host)
    activations = None
    if plan.moves_activations:
        file = DiskActivations(plan, device, *spill, poison=poison) if spill else None
        activations = ActivationStore(plan, device, held_activation_bytes(plan, layout), file)

    def hooks() -> Iterator[StepHooks]:
        if activations:
            yield OffloadedActivations(structure, activations)
        yield OffloadedGradients(store, offloader, plan.deferred_offload_layers)
        if plan.gradients.sums is Tier.HOST:
            yield OffloadedPartialSums(store, offloader, layout.updated)
        if device_shard:
            yield DeviceUpdates(device_shard, store, device, gate)
        if muon:
            yield MuonUpdates(plan, layout, device, store, muon, offloader.submit, rank=ranks.rank, poison=poison)

    step_loss = StepLoss(plan, device, model, store)
    source = streamer if plan.host_layers else AllResidentSource()
    runner = StepRunner(plan, device, model, source, step_loss, store, ranks, list(hooks()))
    return Engine(
        plan=plan,
        device=device,
        host=host,
        ranks=ranks,
        model=model,
        streamer=streamer,
        gradients=offloader,
        activations=activations,
        runner=runner,
        evaluator=Evaluator(device, model, streamer, plan.compute.score_chunk_tokens),
        sampler=Sampler(device, model, streamer),
        warm_up=WarmUp(plan, memory, model, step_loss),
        captured_step=CapturedStep(plan, device, runner, store) if plan.step.captured and ranks.size == 1 else None,
    )
