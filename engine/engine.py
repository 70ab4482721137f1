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
from typing import Any, Protocol, TypeVar

import torch

from megatrain_ray.engine.bound_modules import BoundModules
from megatrain_ray.engine.deadlines import DEADLINE_S
from megatrain_ray.engine.device import Device, MemoryStatistics
from megatrain_ray.engine.evaluator import Evaluator
from megatrain_ray.engine.gradients import GradientStore
from megatrain_ray.engine.layout import ModelLayout
from megatrain_ray.engine.micro_batch import MicroBatch
from megatrain_ray.engine.model import ModelFactory, ModelStructure, build_empty
from megatrain_ray.engine.offload import Departure, Fetch, GradientOffloader
from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.planner import residency_of
from megatrain_ray.engine.residency import Residency
from megatrain_ray.engine.residents import Residents
from megatrain_ray.engine.seams import GradSink, ParamSource
from megatrain_ray.engine.shard import UpdateHeader
from megatrain_ray.engine.skeleton import Skeleton
from megatrain_ray.engine.slots import SlotRing
from megatrain_ray.engine.step import StepInput, StepOutput, StepRunner
from megatrain_ray.engine.streamer import LayerStreamer
from megatrain_ray.engine.visits import Visit, forward_visits, visits
from megatrain_ray.errors import MegatrainError
from megatrain_ray.trace import Stage

T = TypeVar("T")


class Host(ParamSource, GradSink, Protocol):
    """Both directions."""

    async def drain(self, generation: int) -> None:
        """Waits until every layer has this generation."""


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
        poison: bool = False,
    ) -> None:  # fmt: skip
        """`poison` fills released device memory with NaN: a use after release becomes a wrong loss."""
        self.device = device
        self._plan = plan
        self._host = host
        self._structure = structure
        self._layout: ModelLayout = structure.layout(plan.num_fragments)
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        memory = device.allocate(sum(slot.num_bytes for slot in plan.slots))
        ring = SlotRing(memory, [slot.num_bytes for slot in plan.slots], poison=poison)
        self.streamer = LayerStreamer(device, ring, self._layout, host, plan.update_deadline_s + DEADLINE_S)
        self._offloader = GradientOffloader(device, host)
        self._visits = visits(len(plan.layers), plan.num_micro_batches, plan.order, self._layout.lowest_trained)
        self._residency = self._residency_of(self._visits)
        model = build_empty(factory, plan.precision.working_dtype)
        skeleton = Skeleton(model, structure, device.torch_device)
        residents = Residents(self._layout, plan.precision.working_dtype, memory)
        modules = BoundModules(structure, self._layout, skeleton, residents)
        self._evaluator = Evaluator(
            structure, device, skeleton, self.streamer, residents, modules, plan.loss_chunk_tokens
        )
        self.runner = StepRunner(
            plan=plan,
            structure=structure,
            layout=self._layout,
            device=device,
            skeleton=skeleton,
            streamer=self.streamer,
            residents=residents,
            modules=modules,
            store=GradientStore(plan, self._layout, device, poison=poison),
            transfer=self._transfer,
        )

    def _transfer(self, transfer: Departure | Fetch) -> None:
        self._loop.call_soon_threadsafe(self._offloader.submit_nowait, transfer)

    async def step(self, step: StepInput, settings: UpdateSettings) -> StepReport:
        """One step: update `step.step` is committed when it returns, not yet done.

        Raises MegatrainError when a gradient is not finite and there is no clipping to skip the step by.
        """
        start = time.perf_counter()
        if settings.clip is None:
            await self._host.commit(_header(step.step, settings, 1.0, skip=False), 0.0)
        offloading = self._offloader.run(step.step)
        output = await self._stream(self._residency, step.step - 1, self._compute(step), offloading)
        at_s = self.device.timeline.now(Stage.COMPUTE)
        self.device.timeline.host_waits(at_s)
        skip = output.bad_parameter is not None
        if settings.clip is None and skip:
            raise MegatrainError(
                f"step {step.step}: the gradient of {output.bad_parameter} is not finite (loss {output.loss}) and "
                "train.clip is null, so the update has begun; the last save is intact: export it and train on from "
                "that folder in a new run_dir, with train.clip set or a lower train.lr"
            )
        if settings.clip is not None:
            scale = clip_scale(output.grad_norm, settings.clip)
            await self._host.commit(_header(step.step, settings, scale, skip=skip), at_s)
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

    async def evaluate(self, micro_batches: Sequence[MicroBatch], generation: int) -> float:
        """Cross-entropy of the weights of this generation, summed over the supervised tokens: the model in evaluation
        mode, in the plan's loop order, nothing else changed. Between steps; waits until every layer has its update."""
        await self._host.drain(generation)
        order = forward_visits(len(self._plan.layers), len(micro_batches), self._plan.order)
        computing = self.on_compute_thread(lambda: self._evaluator.run(micro_batches, order))
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
            raise _first(failures) from None
        finally:
            await self.streamer.cancel()

    async def _compute(self, step: StepInput) -> StepOutput:
        try:
            return await self.on_compute_thread(lambda: self.runner.run(step, self._visits))
        finally:
            self._offloader.submit_nowait(None)

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
        self._thread.shutdown()
        self.device.close()


def clip_scale(norm: float, max_norm: float) -> float:
    """The coefficient of torch.nn.utils.clip_grad_norm_, in its FP32 arithmetic; 1.0 when clipping does not bite."""
    coefficient = max_norm / (torch.tensor(norm, dtype=torch.float32) + 1e-6)
    return float(torch.clamp(coefficient, max=1.0))


def _header(update: int, settings: UpdateSettings, scale: float, *, skip: bool) -> UpdateHeader:
    return UpdateHeader(update, settings.adam_step, settings.lr, scale, skip, settings.save)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that the others followed from: cancellations come second."""
    flat: list[BaseException] = []
    for failure in failures.exceptions:
        flat.append(_first(failure) if isinstance(failure, BaseExceptionGroup) else failure)
    own = [f for f in flat if isinstance(f, MegatrainError)]
    return (own or flat)[0]
