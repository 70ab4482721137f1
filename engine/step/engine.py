"""Joins the device, slots, streamer and gradients of one plan, and runs the asyncio side of a step.

One compute thread runs the step. The event loop moves data and waits for it. `Engine` is what a GpuWorker actor holds.
It also runs in any process that has an event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from megatrain_ray.engine.activations.activation_store import ActivationStore, held_activation_bytes
from megatrain_ray.engine.activations.disk_activations import ActivationFile
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.device.device import Device, MemoryStatistics
from megatrain_ray.engine.device.ranks import OneRank, Ranks
from megatrain_ray.engine.device.task_failures import first_failure
from megatrain_ray.engine.gradients.gradient_offloader import GradientOffloader
from megatrain_ray.engine.gradients.gradient_store import GradientStore
from megatrain_ray.engine.gradients.muon_directions import Orthogonalizer
from megatrain_ray.engine.gradients.step_gradients import StepGradients
from megatrain_ray.engine.host.interfaces import Host, UpdateHeader
from megatrain_ray.engine.layer_calls.compiled_call import CompiledCall
from megatrain_ray.engine.layer_calls.skeleton import Skeleton
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.model.chunked_loss import ChunkSums, chunk_sums
from megatrain_ray.engine.model.micro_batch import MicroBatch
from megatrain_ray.engine.model.structure import ModelFactory, ModelStructure, build_empty
from megatrain_ray.engine.optimizer.muon import Muon
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import Residency
from megatrain_ray.engine.plan.schedule import Visit, forward_visits
from megatrain_ray.engine.plan.step_residency import residency_of
from megatrain_ray.engine.shards.device_shard import DeviceShard, UpdateGate
from megatrain_ray.engine.step.captured_step import CapturedStep
from megatrain_ray.engine.step.evaluator import Evaluator
from megatrain_ray.engine.step.step_loss import StepLoss
from megatrain_ray.engine.step.step_runner import StepInput, StepOutput, StepRunner, Submitted
from megatrain_ray.engine.step.warm_up import Coming, Rehearsal
from megatrain_ray.engine.weights_stream.bound_modules import BoundModules
from megatrain_ray.engine.weights_stream.bound_weights import Residents
from megatrain_ray.engine.weights_stream.layer_streamer import LayerStreamer, NoStreamer
from megatrain_ray.engine.weights_stream.slot_all_gather import SlotGather
from megatrain_ray.engine.weights_stream.slot_ring import SlotRing
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.storage.blob_store import BlobStore
from megatrain_ray.spans import Row
from megatrain_ray.virtual_clock import Stage

T = TypeVar("T")


@dataclass(frozen=True)
class UpdateSettings:
    """Holds what a step's update needs besides the gradients.

    adam_step: AdamW's own step count, if this update is not skipped.
    clip: maximum gradient norm; None: no clipping.
    save: whether a save wants the generation that this update makes.
    """

    lr: float
    adam_step: int
    clip: float | None
    save: bool = False


@dataclass(frozen=True)
class StepReport:
    """Reports the result, time and memory of one step.

    cross_entropy: as in `StepOutput`.
    grad_norm: global gradient norm before clipping.
    exposed_s: seconds that the compute stage waited, by cause.
    """

    step: int
    loss: float
    cross_entropy: float | None
    grad_norm: float
    skipped: bool
    bad_parameter: str | None
    step_s: float
    exposed_s: dict[str, float]
    memory: MemoryStatistics


class Engine:
    """Runs steps one after the other. Create it and use it on one event loop. `close` frees everything."""

    def __init__(
        self, factory: ModelFactory, structure: ModelStructure, plan: Plan, device: Device, host: Host, *,
        muon: Muon | None = None, device_shard: DeviceShard | None = None, gate: UpdateGate | None = None,
        spill: tuple[BlobStore, str] | None = None, ranks: Ranks | None = None, poison: bool = False,
    ) -> None:  # fmt: skip
        """Allocate the slots and build all components that the plan asks for.

        muon: Muon's constants, if Muon trains something.
        device_shard: weights and optimizer state of the layers that live on the device, if there are any.
        gate: tells a save about the device's updates, if those layers are saved.
        spill: store and name of a blob of `Plan.activation_file_bytes`, if the plan has activations on disk.
        ranks: the other GPU workers of the run, if there are any; each computes a part of the step.
        poison: fill released device memory with NaN, so that a use after release becomes a wrong loss.
        """
        self.device = device
        self._plan = plan
        self._host = host
        self._ranks = ranks or OneRank()
        self._structure = structure
        whole = structure.layout(plan.num_fragments)
        self._layout: ModelLayout = whole.on_host(self._ranks.rank // plan.hosts.gpus_per_host, plan.hosts.num_hosts)
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        memory = device.allocate(sum(slot.num_bytes for slot in plan.slots.weights))
        ring = SlotRing(memory, [slot.num_bytes for slot in plan.slots.weights], poison=poison)
        gathers = self._slot_gather() if plan.slots.gathered else None
        deadline_s = plan.update_deadline_s + DEADLINE_S
        self.streamer = LayerStreamer(device, ring, self._layout, host, deadline_s, gathers)
        self._gradients = StepGradients(GradientOffloader(device, host))
        self._visits = plan.visits(self._layout.lowest_trained)
        self._residency = self._residency_of(self._visits)
        model = build_empty(factory, plan.precision.working_dtype)
        self._skeleton = Skeleton(model, structure, device.torch_device)
        self._residents = Residents(self._layout, plan.precision.working_dtype, memory)
        if device_shard:
            self._residents.settle(device_shard.memory, device_shard.regions())
        modules = BoundModules(
            structure, self._layout, self._skeleton, self._residents, plan.layers, plan.compute.mlp_chunk_tokens
        )
        sums: ChunkSums = partial(chunk_sums, self._skeleton.logits)
        if plan.compute.compiled_loss:
            sums = CompiledCall("chunks of the loss", sums)
        self._evaluator = Evaluator(
            structure, device, self._skeleton, self.streamer, self._residents, modules, plan.compute.loss_chunk_tokens
        )
        store = GradientStore(plan, self._layout, device, self._ranks, poison=poison)
        step_loss = StepLoss(plan, structure, device, self._skeleton, modules, sums, store)
        self._rehearsal = Rehearsal(
            plan, structure, self._layout, memory, self._skeleton, self._residents, modules, step_loss
        )
        orthogonalizer = None
        if muon is not None:
            orthogonalizer = Orthogonalizer(
                plan, self._layout, device, store, muon, self._gradients.transfer, rank=self._ranks.rank, poison=poison
            )
        self._activations = self._activation_store(spill, poison=poison) if plan.moves_activations else None
        self.runner = StepRunner(
            plan=plan,
            structure=structure,
            layout=self._layout,
            device=device,
            skeleton=self._skeleton,
            streamer=self.streamer if plan.host_layers else NoStreamer(),
            residents=self._residents,
            modules=modules,
            step_loss=step_loss,
            store=store,
            activations=self._activations,
            orthogonalizer=orthogonalizer,
            transfer=self._gradients.transfer,
            device_shard=device_shard,
            gate=gate,
            ranks=self._ranks,
            before_sums=self.streamer.await_submitted if plan.slots.gathered else None,
        )
        self._captured_step = (
            CapturedStep(plan, device, self.runner, self._submit, store) if plan.step.captured else None
        )
        self._device_shard = device_shard
        self._gate = gate

    def _slot_gather(self) -> SlotGather:
        itemsize, deadline_s = self._plan.precision.working_dtype.itemsize, self._plan.update_deadline_s
        return SlotGather(self._layout, itemsize, self.device, self._ranks, deadline_s)

    def _activation_store(self, spill: tuple[BlobStore, str] | None, *, poison: bool) -> ActivationStore:
        plan, device = self._plan, self.device
        file = ActivationFile(plan, device, *spill, poison=poison) if spill else None
        return ActivationStore(plan, device, held_activation_bytes(plan, self._layout), file)

    async def rehearse(self, coming: Coming) -> None:
        """Compile what steps like `coming` need, and capture them if the plan says so.

        Call before the first step.
        """

        def run() -> None:
            self._rehearsal.run(coming)
            if self._captured_step:
                self._captured_step.capture(coming)

        await self.on_compute_thread(run)

    async def step(self, step: StepInput, settings: UpdateSettings) -> StepReport:
        """Run one step and return its report.

        Update `step.step` is committed on return, but it has not yet reached every layer. Raises MegatrainError if a
        gradient is not finite and there is no clipping, because the update has then begun and cannot be skipped.
        """
        start = time.perf_counter()
        header = None
        if settings.clip is None:
            header = _header(step.step, settings, 1.0, skip=False)
            await self._commit(header, 0.0)
        moving = self._gradients.move(step.step)
        output = await self._stream(self._residency, step.step - 1, self._compute(step, settings, header), moving)
        self._end_on_timeline()
        self._gradients.send_waiting(step.step)
        skip = output.bad_parameter is not None
        if settings.clip is None and skip:
            raise MegatrainError(
                f"step {step.step}: the gradient of {output.bad_parameter} is not finite (loss {output.loss}) and "
                "train.clip is null, so the update has begun; the last save is intact: export it and train on from "
                "that folder in a new run_dir, with train.clip set or a lower train.lr"
            )
        exposed_s = await self.on_compute_thread(self.device.take_exposed)
        return StepReport(
            step=step.step,
            loss=output.loss,
            cross_entropy=output.cross_entropy,
            grad_norm=output.grad_norm,
            skipped=skip,
            bad_parameter=output.bad_parameter,
            step_s=time.perf_counter() - start,
            exposed_s=exposed_s,
            memory=self.device.memory(),
        )

    def _end_on_timeline(self) -> None:
        """Advance the virtual clock to the end of the step.

        The next step begins when this step has computed and its gradients have landed.
        """
        timeline = self.device.timeline
        end_s = max(timeline.now(Stage.COMPUTE), timeline.now(Stage.D2H))
        timeline.host_waits(end_s)
        timeline.stage_waits(Stage.COMPUTE, end_s)

    async def drain(self, generation: int) -> None:
        """Wait between steps until every layer has this generation.

        Raises the error that kept a gradient from being offloaded.
        """
        await self._gradients.all_left()
        await self._host.drain(generation)

    async def evaluate(self, micro_batches: Sequence[MicroBatch], generation: int) -> float:
        """Return the cross-entropy of this generation's weights, summed over the supervised tokens of all ranks.

        The model runs in evaluation mode, in the plan's loop order; nothing else changes. Call between steps. Waits
        first until every layer has its update.
        """
        await self.drain(generation)
        order = forward_visits(len(self._plan.layers), len(micro_batches), self._plan.step.order)

        def run() -> float:
            self._choose_attention(micro_batches)
            own = self._evaluator.run(micro_batches, order)
            found = torch.tensor([own], dtype=torch.float64, device=self.device.torch_device)
            return float(sum(self._ranks.gather(found).tolist()))

        computing = self.on_compute_thread(run)
        total = await self._stream(self._residency_of(order), generation, computing)
        await self.on_compute_thread(self.device.take_exposed)  # discard it: no step waited in an evaluation
        return total

    def _residency_of(self, visits: Sequence[Visit]) -> Residency:
        return residency_of(visits, self._structure, self._layout, self._plan)

    async def _stream(
        self, residency: Residency, generation: int, compute: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, None]
    ) -> T:
        """Run the compute thread, the h2d pump and `others` concurrently; return the result of `compute`.

        The first failure cancels all of them and is raised.
        """
        self.streamer.begin(residency, generation)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.streamer.finish(), name="streamer")
                for other in others:
                    group.create_task(other)
                computing = group.create_task(compute, name="compute")
            return computing.result()
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        finally:
            await self.streamer.cancel()

    def _choose_attention(self, micro_batches: Sequence[MicroBatch]) -> None:
        packed = any(micro_batch.positions is not None for micro_batch in micro_batches)
        self._skeleton.attention.set(self._plan.compute.packed_attention if packed else self._plan.compute.attention)

    def _submit(self, step: StepInput, header: UpdateHeader | None = None) -> Submitted:
        self._choose_attention(step.micro_batches)
        return self.runner.submit(step, self._visits, header)

    async def _compute(self, step: StepInput, settings: UpdateSettings, header: UpdateHeader | None) -> StepOutput:
        def run() -> StepOutput:
            if self._captured_step:
                return self._captured_step.run(step)
            return self.runner.read(self._submit(step, header))

        try:
            output = await self.on_compute_thread(run)
            if settings.clip is not None:
                await self._clip(step.step, output, settings, settings.clip)
            if self._gate:
                self._gate.finish(step.step, self.device.record())
            return output
        finally:
            self._gradients.end_step()

    async def _clip(self, update: int, output: StepOutput, settings: UpdateSettings, clip: float) -> None:
        """Commit the update, now that its scale is known, and submit the work that needs the scale."""
        at_s = self.device.timeline.now(Stage.COMPUTE)
        self.device.timeline.host_waits(at_s)
        scale = clip_scale(output.grad_norm, clip)
        # Commit before making Muon's directions: those of later layers wait for room in the slab, which comes free as
        # earlier layers are updated.
        header = _header(update, settings, scale, skip=output.bad_parameter is not None)
        await self._commit(header, at_s)

        def run() -> None:
            self._gradients.keep_waiting(self.runner.departures())
            self.runner.update_residents(header)
            self.runner.orthogonalize(scale)

        await self.on_compute_thread(run)

    async def _commit(self, header: UpdateHeader, at_s: float) -> None:
        with self.device.spans.span(Row.STEPS, "commit"):
            await self._host.commit(header, at_s)

    @property
    def whereabouts(self) -> str:
        """Return what the compute thread is doing, for the message about a step that does not end."""
        return self._evaluator.whereabouts or self.runner.whereabouts

    async def on_compute_thread(self, function: Callable[[], T]) -> T:
        """Run `function` on the compute thread, where every torch call that computes runs; return its result."""

        def run() -> T:
            with self.device.activate():
                return function()

        return await self._loop.run_in_executor(self._thread, run)

    async def close(self) -> None:
        """Stop the compute thread and the device, and cancel gradient transfers. Idempotent."""
        await self._gradients.cancel()
        self._thread.shutdown()
        if self._activations:
            self._activations.close()
        self.device.close()
        if self._captured_step:
            self._captured_step.close()


def clip_scale(norm: float, max_norm: float) -> float:
    """Return the scale that clips gradients of this norm to `max_norm`; 1.0 if the norm is small enough.

    This is the coefficient of torch.nn.utils.clip_grad_norm_, in its FP32 arithmetic.
    """
    coefficient = max_norm / (torch.tensor(norm, dtype=torch.float32) + 1e-6)
    return float(torch.clamp(coefficient, max=1.0))


def _header(update: int, settings: UpdateSettings, scale: float, *, skip: bool) -> UpdateHeader:
    return UpdateHeader(update, settings.adam_step, settings.lr, scale, skip, settings.save)
