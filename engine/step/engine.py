"""The engine: device, slots, streamer and gradients of one plan, and the asyncio side of a step.

One compute thread runs the step; the event loop moves what moves. `Engine` is what a GpuWorker actor holds, and it
runs as well in any process with an event loop.
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
    """What a step's update needs that the gradients do not tell. `adam_step`: AdamW's own count if not skipped.
    `save`: a save wants the generation that the update makes."""

    lr: float
    adam_step: int
    clip: float | None
    save: bool = False


@dataclass(frozen=True)
class StepReport:
    """`cross_entropy` as in StepOutput. `grad_norm` before clipping. `exposed_s`: seconds the compute stage waited, by
    cause."""

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
    """Runs steps one after the other. Create and use on one event loop; `close` frees everything."""

    def __init__(
        self, factory: ModelFactory, structure: ModelStructure, plan: Plan, device: Device, host: Host, *,
        muon: Muon | None = None, device_shard: DeviceShard | None = None, gate: UpdateGate | None = None,
        spill: tuple[BlobStore, str] | None = None, ranks: Ranks | None = None, poison: bool = False,
    ) -> None:  # fmt: skip
        """`muon`: its constants, where it trains something. `device_shard`: the layers that live on the device, where
        there are any; `gate`: where these are saved. `spill`: a blob of `Plan.activation_file_bytes`, where activations
        wait on disk, by its store and name. `ranks`: where others compute the rest of a step. `poison` fills released
        device memory with NaN: a use after release becomes a wrong loss."""
        self.device = device
        self._plan = plan
        self._host = host
        self._ranks = ranks or OneRank()
        self._structure = structure
        whole = structure.layout(plan.num_fragments)
        self._layout: ModelLayout = whole.on_host(self._ranks.rank // plan.host_gpus, plan.num_hosts)
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        memory = device.allocate(sum(slot.num_bytes for slot in plan.slots))
        ring = SlotRing(memory, [slot.num_bytes for slot in plan.slots], poison=poison)
        gathers = self._slot_gather() if plan.gathers_slots else None
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
            structure, self._layout, self._skeleton, self._residents, plan.layers, plan.mlp_chunk_tokens
        )
        sums: ChunkSums = partial(chunk_sums, self._skeleton.logits)
        if plan.compiled_loss:
            sums = CompiledCall("chunks of the loss", sums)
        self._evaluator = Evaluator(
            structure, device, self._skeleton, self.streamer, self._residents, modules, plan.loss_chunk_tokens
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
            before_sums=self.streamer.await_submitted if plan.gathers_slots else None,
        )
        self._captured_step = CapturedStep(plan, device, self.runner, self._submit, store) if plan.captured else None
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
        """Compiles what steps like those need compiled, and captures them where the plan says so; before the first
        one."""

        def run() -> None:
            self._rehearsal.run(coming)
            if self._captured_step:
                self._captured_step.capture(coming)

        await self.on_compute_thread(run)

    async def step(self, step: StepInput, settings: UpdateSettings) -> StepReport:
        """One step: update `step.step` is committed when it returns, not yet done.

        Raises MegatrainError when a gradient is not finite and there is no clipping to skip the step by.
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
        """The next step begins when this one has computed and its gradients have landed."""
        timeline = self.device.timeline
        end_s = max(timeline.now(Stage.COMPUTE), timeline.now(Stage.D2H))
        timeline.host_waits(end_s)
        timeline.stage_waits(Stage.COMPUTE, end_s)

    async def drain(self, generation: int) -> None:
        """Between steps: waits until every layer has the generation. Raises what kept a gradient from leaving."""
        await self._gradients.all_left()
        await self._host.drain(generation)

    async def evaluate(self, micro_batches: Sequence[MicroBatch], generation: int) -> float:
        """Cross-entropy of the weights of this generation, summed over the supervised tokens of all ranks: the model in
        evaluation mode, in the plan's loop order, nothing else changed. Between steps; waits until every layer has its
        update."""
        await self.drain(generation)
        order = forward_visits(len(self._plan.layers), len(micro_batches), self._plan.order)

        def run() -> float:
            self._choose_attention(micro_batches)
            own = self._evaluator.run(micro_batches, order)
            found = torch.tensor([own], dtype=torch.float64, device=self.device.torch_device)
            return float(sum(self._ranks.gather(found).tolist()))

        computing = self.on_compute_thread(run)
        total = await self._stream(self._residency_of(order), generation, computing)
        await self.on_compute_thread(self.device.take_exposed)  # no step waited for it
        return total

    def _residency_of(self, visits: Sequence[Visit]) -> Residency:
        return residency_of(visits, self._structure, self._layout, self._plan)

    async def _stream(
        self, residency: Residency, generation: int, compute: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, None]
    ) -> T:
        """Compute thread, h2d pump and what else there is together; the first failure ends all of them."""
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
        self._skeleton.attention.set(self._plan.packed_attention if packed else self._plan.attention)

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
        """Commits the update, now that its scale is known, and makes the directions that need it."""
        at_s = self.device.timeline.now(Stage.COMPUTE)
        self.device.timeline.host_waits(at_s)
        scale = clip_scale(output.grad_norm, clip)
        # Before the directions: those of later layers wait for room until earlier layers are updated.
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
        """What the compute thread does, for the message about a step that does not end."""
        return self._evaluator.whereabouts or self.runner.whereabouts

    async def on_compute_thread(self, function: Callable[[], T]) -> T:
        """Runs it where every torch call that computes runs."""

        def run() -> T:
            with self.device.activate():
                return function()

        return await self._loop.run_in_executor(self._thread, run)

    async def close(self) -> None:
        """Stops the compute thread and the device. Idempotent."""
        await self._gradients.cancel()
        self._thread.shutdown()
        if self._activations:
            self._activations.close()
        self.device.close()
        if self._captured_step:
            self._captured_step.close()


def clip_scale(norm: float, max_norm: float) -> float:
    """The coefficient of torch.nn.utils.clip_grad_norm_, in its FP32 arithmetic; 1.0 when clipping does not bite."""
    coefficient = max_norm / (torch.tensor(norm, dtype=torch.float32) + 1e-6)
    return float(torch.clamp(coefficient, max=1.0))


def _header(update: int, settings: UpdateSettings, scale: float, *, skip: bool) -> UpdateHeader:
    return UpdateHeader(update, settings.adam_step, settings.lr, scale, skip, settings.save)
