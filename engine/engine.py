"""The engine: device, slots, streamer and gradients of one plan, and the asyncio side of a step.

One compute thread runs the step; the event loop moves what moves. `Engine` is what a GpuWorker actor holds, and it
runs as well in any process with an event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from megatrain_ray.engine.deadlines import DEADLINE_S
from megatrain_ray.engine.device import Device, MemoryStatistics
from megatrain_ray.engine.gradients import GradientStore
from megatrain_ray.engine.layout import ModelLayout
from megatrain_ray.engine.model import ModelFactory, ModelStructure, build_empty
from megatrain_ray.engine.offload import Departure, Fetch, GradientOffloader
from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.planner import step_residency
from megatrain_ray.engine.rehearsal import rehearse
from megatrain_ray.engine.residents import Residents
from megatrain_ray.engine.seams import GradSink, ParamSource
from megatrain_ray.engine.shard import UpdateHeader
from megatrain_ray.engine.skeleton import Skeleton
from megatrain_ray.engine.slots import SlotRing
from megatrain_ray.engine.step import StepInput, StepOutput, StepRunner
from megatrain_ray.engine.streamer import LayerStreamer
from megatrain_ray.engine.visits import visits
from megatrain_ray.errors import MegatrainError
from megatrain_ray.trace import Stage

T = TypeVar("T")


class Host(ParamSource, GradSink, Protocol):
    """Both directions; `drain` waits for a generation of every layer."""


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
    """`grad_norm` before clipping. `exposed_s`: seconds the compute stage waited, by cause."""

    step: int
    loss: float
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
        self._layout: ModelLayout = structure.layout(plan.num_fragments)
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        memory = device.allocate(sum(slot.num_bytes for slot in plan.slots))
        ring = SlotRing(memory, [slot.num_bytes for slot in plan.slots], poison=poison)
        residency = step_residency(structure, self._layout, plan)
        self.streamer = LayerStreamer(device, ring, self._layout, residency, host, plan.update_deadline_s + DEADLINE_S)
        self._offloader = GradientOffloader(device, host)
        self._visits = visits(len(plan.layers), plan.num_micro_batches, plan.order)
        model = build_empty(factory, plan.precision.working_dtype)
        self._skeleton = Skeleton(model, structure, device.torch_device)
        self._residents = Residents(self._layout, plan.precision.working_dtype, memory)
        self.runner = StepRunner(
            plan=plan,
            structure=structure,
            layout=self._layout,
            device=device,
            skeleton=self._skeleton,
            streamer=self.streamer,
            residents=self._residents,
            store=GradientStore(plan, self._layout, device, poison=poison),
            transfer=self._transfer,
        )

    def _transfer(self, transfer: Departure | Fetch) -> None:
        self._loop.call_soon_threadsafe(self._offloader.submit_nowait, transfer)

    async def rehearse(self) -> None:
        """Compiles what the plan's layers need compiled; before the first step."""
        await self.on_compute_thread(
            lambda: rehearse(self._skeleton, self._plan, self.device.torch_device, self._residents.saving())
        )

    async def step(self, step: StepInput, settings: UpdateSettings) -> StepReport:
        """One step: update `step.step` is committed when it returns, not yet done.

        Raises MegatrainError when a gradient is not finite and there is no clipping to skip the step by.
        """
        start = time.perf_counter()
        if settings.clip is None:
            await self._host.commit(_header(step.step, settings, 1.0, skip=False), 0.0)
        output = await self._stream(step)
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
            grad_norm=output.grad_norm,
            skipped=skip,
            bad_parameter=output.bad_parameter,
            step_s=time.perf_counter() - start,
            exposed_s=exposed_s,
            memory=self.device.memory(),
        )

    async def _stream(self, step: StepInput) -> StepOutput:
        """Compute thread, h2d pump and d2h pumps together; the first failure ends all of them."""
        self.streamer.begin(generation=step.step - 1)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._offloader.run(step.step), name="offloader")
                group.create_task(self.streamer.finish(), name="streamer")
                computing = group.create_task(self._compute(step), name="compute")
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
        return self.runner.whereabouts

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
