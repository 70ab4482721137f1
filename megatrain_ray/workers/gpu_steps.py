"""Runs the steps and evaluations of a GPU worker one after the other, whatever order they are asked for in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import torch

from megatrain_ray.accounting.work_counters import WorkColumns
from megatrain_ray.data.rollout_stream import compared_logprobs
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.model.chunked_loss import Objective, Targets
from megatrain_ray.engine.model.micro_batch import MicroBatch, micro_batches_of
from megatrain_ray.engine.objectives.kto_objective import KtoObjective
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.step.engine import Engine
from megatrain_ray.engine.step.sampler import MOST_ROWS, Completion, Prompt, SamplingParams
from megatrain_ray.engine.step.step_data import StepInput
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.errors import DeadlineError
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.images.feature_files import FeatureReader
from megatrain_ray.io.tokens.token_files import OLD_LOGPROBS
from megatrain_ray.metrics.step_rows import StepRows
from megatrain_ray.model.engine_settings import objective_of
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.rollouts.answer_scores import AnswerBatch, SampledAnswer
from megatrain_ray.spans import RecordedSpans, Row, traced_steps
from megatrain_ray.workers.messages import HeldOutLoss, Progress, StepResult
from megatrain_ray.workers.open_device import memory_explained
from megatrain_ray.workers.server_sampler import ServerSampler

Scores = dict[str, list[list[float]]]  # by key of records: log-probabilities of each answer's tokens
FetchBatch = Callable[[int], Awaitable[Batch]]  # returns the batch of a step, or a held-out batch by its number


class GpuSteps:
    """Runs the steps of one rank. Its methods may be called early and in any order.

    Ray does not keep the order of calls to an async actor. No step begins after one that failed.
    """

    def __init__(
        self, run_spec: RunSpec, engine: Engine, rank: int, fetch_batch: FetchBatch, fetch_held_out: FetchBatch,
        rows: StepRows, work: WorkColumns, progress: Progress, server: ServerSampler | None = None,
    ) -> None:  # fmt: skip
        """Get ready for the step after `progress`, and begin to fetch its batch.

        work: makes the columns of rows that tell of all processes of the host.
        server: samples in place of the engine.
        """
        self._run_spec = run_spec
        self._engine = engine
        self._rank = rank
        self._fetch_batch = fetch_batch
        self._fetch_held_out = fetch_held_out
        self._rows = rows
        self._work = work
        self._progress = progress
        self._server = server
        self._turn = asyncio.Condition()
        self._num_evaluated: dict[int, int] = {}  # {step after which the newest evaluation runs: its finished batches}
        self.waits_for = ""  # name of the batch that the data process is awaited for
        self._most_rows = MOST_ROWS  # that each rank samples together
        self._objective = objective_of(run_spec.config, run_spec.teacher)
        self._features = FeatureReader(run_spec.features.training)
        self._held_out_features = FeatureReader(run_spec.features.held_out)
        self._reference: WeightSource | None = None  # opened when it is first needed
        self._next_batch: asyncio.Future[Batch] | None = None
        self._arrived_s = 0.0  # when the newest batch arrived, by the clock of rows
        self._fetch_after(progress.step)

    def _fetch_after(self, step: int) -> None:
        """Begin to fetch the batch of the next step, unless its rollouts have yet to be sampled."""
        self._next_batch, train = None, self._run_spec.config.train
        if step < max(1, train.num_steps) and not (train.rollouts and step % train.sampling_interval == 0):
            self._next_batch = asyncio.ensure_future(self._fetch_batch(step + 1))
            self._next_batch.add_done_callback(self._note_arrival)

    def _note_arrival(self, batch: asyncio.Future[Batch]) -> None:
        self._arrived_s = time.perf_counter()

    @property
    def current_phase(self) -> str:
        """Return what another process is waited for; nothing while the engine computes."""
        if self._server is not None and self._server.current_phase:
            return self._server.current_phase
        return f"waiting for the {self.waits_for} from the data process" if self.waits_for else ""

    async def step(self, step: int, save: bool) -> StepResult:
        """Run one step. `save`: a save wants the state after it."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._progress.step == step - 1)
            await self._trace(step in traced_steps(self._run_spec.config.log.trace))
            with self._engine.device.spans.span(Row.STEPS, f"step {step}"):
                result = await self._step(step, save)
            self._turn.notify_all()
            return result

    async def _step(self, step: int, save: bool) -> StepResult:
        if self._next_batch is None:  # rollouts were sampled and rewarded since the step before
            self._rows.start_clock()
        start = time.perf_counter()
        fetching = self._next_batch or self._fetch_batch(step)
        batch = await self._take_batch(fetching, f"batch of step {step}", self._features)
        # A step of a stream is submitted only once its batch can be drawn, so it may have waited before it began.
        data_s = max(time.perf_counter() - start, self._arrived_s - self._rows.started_s)
        train = self._run_spec.config.train
        self._fetch_after(step)
        start = time.perf_counter()
        objective = await self._objective_of(batch, step - 1)
        forward_s = time.perf_counter() - start
        inputs = StepInput(step, self._micro_batches(batch), batch.total_weight, train.seed, objective, batch.counts)
        params = UpdateParams(step, self._progress.adam_step + 1, self._rows.learning_rate(step), save=save)
        with memory_explained(self._run_spec.plan, f"step {step}"):
            report = await self._engine.step(inputs, params, train.clip)
        report = replace(report, step_s=report.step_s + forward_s)
        self._engine.device.timeline.clear()  # nobody reads these records, which take 8 KB a step
        self._progress = Progress(step, self._progress.adam_step + (not report.skipped))
        row = self._rows.row(report, batch, data_s)
        return StepResult(row | self._work.columns(step, self._rows.newest), self._progress)

    async def _objective_of(self, batch: Batch, step: int) -> Objective:
        return await objective_of_batch(self._engine, self._objective, batch, step, self._micro_batches)

    def _micro_batches(self, batch: Batch) -> tuple[MicroBatch, ...]:
        """Return the micro-batches of this rank. Every rank has the same number."""
        everything = micro_batches_of(batch, self._run_spec.plan.step.micro_batch_size)
        count = len(everything) // self._run_spec.plan.hosts.num_gpus
        return everything[self._rank * count : (self._rank + 1) * count]

    async def _trace(self, on: bool) -> None:
        """Begin or end the recording of spans, between two steps."""
        device = self._engine.device
        if on != device.spans.on:
            await self._engine.on_compute_thread(device.start_tracing if on else device.stop_tracing)

    async def spans(self, last: int) -> RecordedSpans:
        """Return the spans of the traced steps, once step `last` is over."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._progress.step >= last)
            await self._trace(False)
            return self._engine.device.spans.take()

    async def evaluate(self, step: int, index: int) -> HeldOutLoss:
        """Return the loss of one batch of the held-out data after the update of `step`, before the next one.

        index: number of the batch. Batches run by number, from the first one on, as on every other GPU.
        """
        fetching = asyncio.ensure_future(self._fetch_held_out(index))  # while the previous batch is evaluated
        async with self._between_steps(step, lambda: self._num_evaluated.get(step, 0) == index):
            batch = await self._take_batch(fetching, f"held-out batch {index}", self._held_out_features)
            with memory_explained(self._run_spec.plan, f"evaluating after step {step}"):
                loss = await self._held_out_loss(batch, step)
            self._num_evaluated = {step: index + 1}
            return loss

    @asynccontextmanager
    async def _between_steps(self, step: int, is_due: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
        """Run the block after the update of `step`, once it is due, and leave its time out of the next row."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._progress.step == step and is_due())
            yield
            self._engine.device.timeline.clear()
            self._rows.start_clock()
            self._work.leave_out_evaluation()
            self._turn.notify_all()

    async def _held_out_loss(self, batch: Batch, step: int) -> HeldOutLoss:
        micro_batches = self._micro_batches(batch)
        sums = HeldOutLoss(0.0, batch.num_supervised, batch.total_weight, num_tokens=batch.num_tokens)
        if self._run_spec.keeps_logprobs:
            top = self._run_spec.teacher
            logprobs = await self._engine.logprobs(micro_batches, step, top)
            shape = batch.targets.shape if top is None else (*batch.targets.shape, -1)
            return sums if self._rank else replace(sums, logprobs=logprobs.numpy().reshape(shape))  # rank 0 is asked
        objective = await self._objective_of(batch, step)
        if objective.distillation is not None:
            total, plain = await self._engine.evaluate(micro_batches, step, objective)
            return replace(sums, total=total, metrics={"cross_entropy": (plain, batch.total_weight)})
        if objective.logprob_objective is None:
            (total,) = await self._engine.evaluate(micro_batches, step)
            return replace(sums, total=total)
        logprobs = await self._engine.logprobs(micro_batches, step)
        assert batch.counts is not None
        found = objective.logprob_objective.loss(logprobs, _whole(batch), batch.counts)
        metrics = {name: (mean.total.item(), mean.divisor) for name, mean in found.metrics.items()} | batch.means
        return replace(sums, total=found.loss.total.item(), total_weight=found.loss.divisor, metrics=metrics)

    async def sample(self, step: int, prompts: list[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Return the completions of the first of the prompts, as many as the devices have room for at once.

        They are by the weights after the update of `step`. Raises torch.OutOfMemoryError if one has room for none.
        """
        async with self._between_steps(step):
            if self._server is not None:  # rank 0 is asked
                return [] if self._rank else await self._server.sample(prompts, sampling, step)
            with memory_explained(self._run_spec.plan, f"sampling after step {step}"):
                return await self._sample(prompts, sampling, step)

    async def _sample(self, prompts: list[Prompt], sampling: SamplingParams, step: int) -> list[Completion]:
        num_gpus = self._run_spec.plan.hosts.num_gpus
        while True:
            chosen = prompts[: self._most_rows * num_gpus]
            try:
                return await self._engine.sample(chosen, sampling, step)
            except torch.OutOfMemoryError:  # of all ranks, if one has no room
                if len(chosen) <= num_gpus:
                    raise
                self._most_rows = -(-len(chosen) // num_gpus) // 2  # from now on: each try costs time

    async def score(self, step: int, answers: list[SampledAnswer]) -> Scores:
        """Return the log-probabilities of sampled answers that the objective needs, before the update after `step`."""
        async with self._between_steps(step):
            with memory_explained(self._run_spec.plan, f"computing log-probabilities after step {step}"):
                return await self._score(answers, step)

    async def _score(self, answers: list[SampledAnswer], step: int) -> Scores:
        run_spec, plan = self._run_spec, self._run_spec.plan
        micro_batch_size = plan.step.micro_batch_size * plan.hosts.num_gpus
        found: Scores = {key: [] for key in compared_logprobs(run_spec.config.train)}
        if run_spec.reference is not None and self._reference is None:
            self._reference = await self._engine.on_compute_thread(run_spec.reference.weights)
        for start in range(0, len(answers), plan.batch_size):
            of_update = answers[start : start + plan.batch_size]
            rows = AnswerBatch(of_update, run_spec.config.data, run_spec.structure.vocab_size, micro_batch_size)
            micro_batches = self._micro_batches(rows.batch)
            for key, of_all in found.items():
                if key == OLD_LOGPROBS:
                    logprobs = await self._engine.logprobs(micro_batches, step)
                else:
                    assert self._reference is not None  # the run has opened it
                    logprobs = await self._engine.reference_logprobs(micro_batches, self._reference)
                of_all += rows.of_answers(logprobs.numpy().reshape(rows.batch.targets.shape))
        return found

    async def _take_batch(self, fetching: Awaitable[Batch], name: str, features: FeatureReader) -> Batch:
        self.waits_for = name
        try:
            async with asyncio.timeout(DEADLINE_S):
                with self._engine.device.spans.span(Row.STEPS, "wait data", waits=True):
                    batch = await fetching
        except TimeoutError:
            raise DeadlineError(f"the data process did not make the {name} within {DEADLINE_S:.0f} s") from None
        finally:
            self.waits_for = ""
        return with_images(batch, features, self._rank, self._run_spec.plan.hosts.num_gpus)

    async def finish(self, last: int) -> None:
        """Wait until step `last` and its update are over, and fetch no more batches."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._progress.step >= last)
        if self._next_batch:
            self._next_batch.cancel()
        await self._engine.drain(self._progress.step)


def with_images(batch: Batch, features: FeatureReader, rank: int, num_ranks: int) -> Batch:
    """Return a batch with the features of the images in the rows of a rank. Raises DiskError."""
    if batch.image_numbers is None:
        return batch
    count = len(batch.image_numbers) // num_ranks
    images = features.of(batch.image_numbers, range(rank * count, (rank + 1) * count))
    mismatched = batch.mismatched and with_images(batch.mismatched, features, rank, num_ranks)
    return replace(batch, images=images, mismatched=mismatched)


async def objective_of_batch(
    engine: Engine, objective: Objective, batch: Batch, step: int,
    divided: Callable[[Batch], Sequence[MicroBatch]],
) -> Objective:  # fmt: skip
    """Return the objective of a batch. KTO's has an estimate of KL by the weights after `step`.

    It is of the whole batch, so that it takes a forward of its own, before the first loss.

    divided: returns the micro-batches of this rank.
    """
    kto = objective.logprob_objective
    if not isinstance(kto, KtoObjective):
        return objective
    kto = kto.with_counts(_whole(batch))
    if kto.estimates_kl:
        assert batch.mismatched is not None  # answers are labelled
        logprobs = await engine.logprobs(divided(batch.mismatched), step)
        kto = kto.with_kl(logprobs, _whole(batch.mismatched))
    return replace(objective, logprob_objective=kto)


def _whole(batch: Batch) -> Targets:
    """Return the targets of all rows of a batch, on the host."""
    (whole,) = micro_batches_of(batch, len(batch.input_ids))
    return whole.uploaded_targets(lambda tensor: tensor)
