"""Runs the asyncio side of a step: one compute thread runs the step, the event loop moves data and waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from megatrain_ray.engine.activations.activation_store import ActivationStore
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.device.ranks import Ranks
from megatrain_ray.engine.gradients.gradient_offloader import GradientOffloader
from megatrain_ray.engine.host.interfaces import Host
from megatrain_ray.engine.model.chunked_loss import (
    Objective,
    OfChunk,
    cross_entropy_sum,
    objective_sums,
    target_logprobs,
    token_scores,
    top_records,
)
from megatrain_ray.engine.model.micro_batch import MicroBatch
from megatrain_ray.engine.objectives.distillation import TopTokens
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId, Residency, residency_of
from megatrain_ray.engine.plan.schedule import FORWARDS_AT_ONCE, LoopOrder, Visit, forward_visits
from megatrain_ray.engine.step.captured_step import CapturedStep
from megatrain_ray.engine.step.evaluator import Evaluator
from megatrain_ray.engine.step.reference_weights import ReferenceWeights
from megatrain_ray.engine.step.sampler import (
    Completion,
    Prompt,
    Sampler,
    SamplingParams,
    SamplingProgress,
    packed,
    unpacked,
)
from megatrain_ray.engine.step.step_data import StepInput, StepOutput, StepReport
from megatrain_ray.engine.step.step_runner import StepRunner
from megatrain_ray.engine.step.warm_up import WarmUp, WarmUpShapes
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.engine.weights_stream.bound_model import BoundModel
from megatrain_ray.engine.weights_stream.layer_streamer import LayerStreamer
from megatrain_ray.errors import MegatrainError, first_failure
from megatrain_ray.spans import Row
from megatrain_ray.virtual_clock import Stage

T = TypeVar("T")


@dataclass(eq=False)
class Engine:
    """Runs steps one after the other. Use it on one event loop. `close` frees everything. Made by `build_engine`."""

    plan: Plan
    device: Device
    host: Host
    ranks: Ranks
    model: BoundModel
    streamer: LayerStreamer
    gradients: GradientOffloader
    activations: ActivationStore | None
    runner: StepRunner
    evaluator: Evaluator
    sampler: Sampler
    warm_up: WarmUp
    captured_step: CapturedStep | None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._residencies: dict[int, Residency] = {}  # of steps, by their number of micro-batches

    async def run_warm_up(self, coming: WarmUpShapes) -> None:
        """Compile what steps like `coming` need, and capture them if the plan says so. Call before the first step."""
        await self.on_compute_thread(lambda: self.warm_up.run(coming))
        if (captured_step := self.captured_step) and coming.trains:
            await self.on_compute_thread(lambda: captured_step.capture(coming))

    async def step(self, step: StepInput, params: UpdateParams, clip: float | None) -> StepReport:
        """Run one step and return its report.

        params: of the step's update if its gradients are finite, not yet scaled.
        clip: maximum gradient norm; None: no clipping.

        Update `step.step` is committed on return, but it has not yet reached every layer. Raises MegatrainError if a
        gradient is not finite and there is no clipping, because the update has then begun and cannot be skipped.
        """
        start = time.perf_counter()
        if clip is None:
            await self._commit(params, 0.0)
        async with self._streaming(self._residency_of_step(len(step.micro_batches)), step.step - 1) as tasks:
            tasks.create_task(self.gradients.run(step.step))
            try:
                output = await self.on_compute_thread(lambda: self._compute(step, params if clip is None else None))
                if clip is not None:
                    await self._clip(output, params, clip)
            finally:
                self.gradients.end_step()
        self._end_on_timeline()
        self.gradients.offload_deferred(step.step)
        if clip is None and output.skipped:
            raise MegatrainError(
                f"step {step.step}: the gradient of {output.bad_parameter} is not finite (loss {output.loss}) and "
                "train.clip is null, so the update has begun; the last save is intact: set train.clip or "
                "lower train.lr, and the same command resumes"
            )
        exposed_s = await self.on_compute_thread(self.device.take_exposed)
        step_s = time.perf_counter() - start
        return StepReport(
            **vars(output), step=step.step, step_s=step_s, exposed_s=exposed_s, memory=self.device.memory()
        )

    def _compute(self, step: StepInput, params: UpdateParams | None) -> StepOutput:
        """Run the step and wait for its results; with `params`, all of its work is submitted then."""
        if self.captured_step:
            output = self.captured_step.run(step)
        else:
            output = self.runner.read(self.runner.submit(step, params))
        if params is not None:
            self.runner.end(step.step)
        return output

    async def _clip(self, output: StepOutput, params: UpdateParams, clip: float) -> None:
        """Commit the update, now that its scale is known, and submit the work that needs the scale."""
        at_s = self.device.timeline.now(Stage.COMPUTE)
        self.device.timeline.host_waits(at_s)
        scale = clip_scale(output.grad_norm, clip)
        # Commit before making Muon's directions: those of later layers wait for room in the slab, which comes free as
        # earlier layers are updated.
        scaled = replace(params, scale=scale, skip=output.skipped)
        await self._commit(scaled, at_s)

        def run() -> None:
            self.runner.apply_scale(scaled)
            self.runner.end(params.update)

        await self.on_compute_thread(run)

    async def _commit(self, params: UpdateParams, at_s: float) -> None:
        with self.device.spans.span(Row.STEPS, "commit"):
            await self.host.commit(params, at_s)

    def _end_on_timeline(self) -> None:
        """Advance the virtual clock to when the step has computed and its gradients have landed."""
        timeline = self.device.timeline
        end_s = max(timeline.now(Stage.COMPUTE), timeline.now(Stage.D2H))
        timeline.host_waits(end_s)
        timeline.stage_waits(Stage.COMPUTE, end_s)

    async def drain(self, generation: int) -> None:
        """Wait between steps until every layer has this generation. Raises what kept a gradient from landing."""
        await self.gradients.join_deferred()
        await self.host.drain(generation)

    async def evaluate(
        self, micro_batches: Sequence[MicroBatch], generation: int, objective: Objective | None = None
    ) -> tuple[float, ...]:
        """Return the cross-entropy of this generation's weights, summed over the supervised tokens of all ranks.

        Each chunk is summed in FP32 on the device. The sums of chunks are added in double precision on the host.

        objective: its sum comes first, if it is given.

        The model runs in evaluation mode, in the plan's loop order; nothing else changes. Call between steps. Waits
        first until every layer has its update.
        """
        num_sums = 1 if objective is None else 2
        of_chunk = cross_entropy_sum if objective is None else partial(objective_sums, objective)

        def add(sums: torch.Tensor) -> tuple[float, ...]:
            columns = sums.view(-1, num_sums).T.tolist()
            own = torch.tensor(list(map(sum, columns)), dtype=torch.float64, device=sums.device)
            return tuple(map(sum, self.ranks.gather(own).view(-1, num_sums).T.tolist()))

        return await self._evaluate(micro_batches, generation, of_chunk, add)

    async def logprobs(
        self, micro_batches: Sequence[MicroBatch], generation: int, top: TopTokens | None = None
    ) -> torch.Tensor:
        """Return the log-probability of every target of all ranks' micro-batches, in the order of tokens.

        It is FP32, 1-D and on the host, and 0 where a token is not supervised. Of a reward model it is the score of
        every token. Call it as `evaluate`.

        top: what is returned of each position as well, after its target's.
        """
        of_chunk = token_scores if self.model.structure.is_reward else target_logprobs
        of_chunk = of_chunk if top is None else partial(top_records, top)
        return await self._evaluate(
            micro_batches, generation, of_chunk, lambda values: self.ranks.gather(values.flatten()).cpu()
        )

    async def reference_logprobs(self, micro_batches: Sequence[MicroBatch], weights: WeightSource) -> torch.Tensor:
        """Return the log-probability of every target by a reference of the same structure, as `logprobs` does.

        weights: of the reference. Each layer is read from there once, for all micro-batches. Call between steps.
        """
        order = forward_visits(len(self.plan.layers), len(micro_batches), LoopOrder.LAYERS_OUTER)
        dtype, num_threads = self.plan.precision.working_dtype, self.plan.compute.num_threads

        def run() -> torch.Tensor:
            source = ReferenceWeights(self.device, self.model.layout, dtype, weights, order, num_threads)
            try:
                found = self.evaluator.run(micro_batches, order, target_logprobs, source)
            finally:
                self.model.forget(source.memory)
            return self.ranks.gather(found.flatten()).cpu()

        found = await self.on_compute_thread(run)
        await self.on_compute_thread(self.device.take_exposed)  # discard it: no step waited
        return found

    async def sample(self, prompts: Sequence[Prompt], sampling: SamplingParams, generation: int) -> list[Completion]:
        """Return a completion of each prompt by this generation's weights. Each rank computes its share together.

        Call it as `evaluate`. Raises torch.OutOfMemoryError, on all ranks, if they are too many for the device of one;
        nothing is lost then.
        """
        await self.drain(generation)
        order = forward_visits(len(self.plan.layers), FORWARDS_AT_ONCE, LoopOrder.MICRO_BATCHES_OUTER)
        residency = self._residency_of(order)
        rank, size = self.ranks.rank, self.ranks.size
        await self.on_compute_thread(lambda: self.sampler.begin(prompts[rank::size], sampling))
        progress = SamplingProgress.GOES_ON
        while progress is SamplingProgress.GOES_ON:  # as long as on any rank: all ranks load the same layers
            async with self._streaming(residency, generation):
                own = await self.on_compute_thread(lambda: self.sampler.run(order))
            progress = SamplingProgress(int((await self._gathered(torch.tensor([own.value]))).max()))
        await self.on_compute_thread(self.device.take_exposed)  # discard it: no step waited
        if progress is SamplingProgress.NO_ROOM:
            await self.on_compute_thread(self.sampler.abandon)
            raise torch.OutOfMemoryError(f"no room for {len(prompts)} completions")
        completions = await self.on_compute_thread(self.sampler.completions)
        gathered = await self._gathered(packed(completions, -(-len(prompts) // size), sampling.max_new_tokens))
        return unpacked(gathered, size, sampling.max_new_tokens)[: len(prompts)]

    async def _gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, 1-D and equally many, rank after rank."""
        return await self.on_compute_thread(lambda: self.ranks.gather(self.device.upload(values)).cpu())

    async def read_from_disk(self, layer: int) -> torch.Tensor:
        """Return the working copy of a layer whose weights are on disk: 1-D, padded, on the host.

        Call between steps, after `drain`.
        """
        layout = self.model.layout.layers[layer]
        flat = torch.empty(layout.size, dtype=self.plan.precision.working_dtype)
        fragments = [FragmentId(layer, index) for index in range(len(layout.fragments))]
        self.host.expect(fragments, 0)
        for fragment in fragments:
            for start, values in (await self.host.fetch(fragment, 0)).parts:
                flat[start : start + len(values)] = values
            self.host.release(fragment, await self.on_compute_thread(self.device.record))
        return flat

    async def _evaluate(
        self, micro_batches: Sequence[MicroBatch], generation: int, of_chunk: OfChunk,
        gather: Callable[[torch.Tensor], T],
    ) -> T:  # fmt: skip
        """Return what `gather` makes of this rank's scores, on the compute thread."""
        await self.drain(generation)
        order = forward_visits(len(self.plan.layers), len(micro_batches), self.plan.step.order)
        async with self._streaming(self._residency_of(order), generation):
            found = await self.on_compute_thread(lambda: gather(self.evaluator.run(micro_batches, order, of_chunk)))
        await self.on_compute_thread(self.device.take_exposed)  # discard it: no step waited in an evaluation
        return found

    def _residency_of_step(self, num_micro_batches: int) -> Residency:
        if num_micro_batches not in self._residencies:
            visits = self.plan.visits(self.model.structure.without_backward, num_micro_batches)
            self._residencies[num_micro_batches] = self._residency_of(visits)
        return self._residencies[num_micro_batches]

    def _residency_of(self, visits: Sequence[Visit]) -> Residency:
        return residency_of(visits, self.model.structure, self.model.layout, self.plan)

    @asynccontextmanager
    async def _streaming(self, residency: Residency, generation: int) -> AsyncIterator[asyncio.TaskGroup]:
        """Stream weights while the block runs; yield a group for more tasks, and wait for all of them.

        The first failure, of a task or of the block, cancels the others and is raised.
        """
        self.streamer.begin(residency, generation)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.streamer.finish(), name="streamer")
                yield group
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        finally:
            await self.streamer.cancel()

    @property
    def current_phase(self) -> str:
        """Return what the compute thread is doing, for the message about a step that does not end."""
        return self.sampler.current_phase or self.evaluator.current_phase or self.runner.current_phase

    async def on_compute_thread(self, function: Callable[[], T]) -> T:
        """Run `function` on the compute thread, where every torch call that computes runs; return its result."""

        def run() -> T:
            with self.device.activate():
                return function()

        return await self._loop.run_in_executor(self._thread, run)

    async def close(self) -> None:
        """Stop the compute thread and the device, and cancel gradient transfers. Idempotent."""
        await self.gradients.cancel()
        self._thread.shutdown()
        if self.activations:
            self.activations.close()
        self.device.close()
        if self.captured_step:
            self.captured_step.close()


def clip_scale(norm: float, max_norm: float) -> float:
    """Return the scale that clips gradients of this norm to `max_norm`; 1.0 if the norm is small enough.

    This is the coefficient of torch.nn.utils.clip_grad_norm_, in its FP32 arithmetic.
    """
    coefficient = max_norm / (torch.tensor(norm, dtype=torch.float32) + 1e-6)
    return float(torch.clamp(coefficient, max=1.0))
