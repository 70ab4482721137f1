"""Runs the process of one GPU: it attaches and pins arenas, and runs an engine on its event loop.

Each step yields one row of metrics.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain_ray.accounting.gpu_work import GpuDisk, GpuWork
from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.engine.device.deadlines import DEADLINE_S, STEP_DEADLINE_S
from megatrain_ray.engine.device.rank_group import Place, RankGroup
from megatrain_ray.engine.host.gradient_slab import held_slab_bytes
from megatrain_ray.engine.host.momenta import Momenta
from megatrain_ray.engine.host.shared_host import SharedHost
from megatrain_ray.engine.host.working_arena import WorkingArena
from megatrain_ray.engine.layer_calls.compiled_call import keep_compiled_graphs
from megatrain_ray.engine.model.chunked_loss import Objective
from megatrain_ray.engine.model.micro_batch import MicroBatch, micro_batches_of
from megatrain_ray.engine.shards.save_gate import EVERY_ATTEMPT, SaveAttempt
from megatrain_ray.engine.shards.save_part import WrittenPart
from megatrain_ray.engine.step.engine import Engine, UpdateSettings
from megatrain_ray.engine.step.step_runner import StepInput, World
from megatrain_ray.engine.step.warm_up import Coming
from megatrain_ray.engine.weights.frozen_checksums import frozen_checksums
from megatrain_ray.errors import DeadlineError, LostProcessError
from megatrain_ray.io.arenas.arena import ArenaHandle
from megatrain_ray.io.arenas.arena_holder import ArenaHolder, Handles
from megatrain_ray.io.batching.batch_stream import Batch
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.metrics.step_rows import StepRows
from megatrain_ray.model.optimizer_settings import muon_of
from megatrain_ray.planning.prepare import Prepared
from megatrain_ray.spans import RecordedSpans, Row, traced_steps
from megatrain_ray.workers.arenas import SLAB, WORDS, WORKING, activations_file, words_bytes, words_in
from megatrain_ray.workers.device_layers import DeviceLayers
from megatrain_ray.workers.device_memory import check_free, memory_explained
from megatrain_ray.workers.node_memory import settle_gpu_worker
from megatrain_ray.workers.open_device import make_device
from megatrain_ray.workers.shard_files import find_momenta, open_activations, open_disk_weights

FetchBatch = Callable[[int], Awaitable[Batch]]  # returns the batch of a step, or a held-out batch by its number


@dataclass(frozen=True)
class Progress:
    """Counts how far training has come.

    step: completed updates, skipped ones included.
    adam_step: those that AdamW counted, that is all that were not skipped.
    """

    step: int
    adam_step: int

    @property
    def num_skipped(self) -> int:
        return self.step - self.adam_step


@dataclass(frozen=True)
class Seat:
    """Describes one of several GPU workers.

    place: where rank 0 listens for the others.
    address: of the worker's own host.
    """

    rank: int
    place: Place
    address: str


@dataclass(frozen=True)
class StepResult:
    """Holds the result of one step.

    row: of metrics.jsonl.
    progress: after the step.
    position: of the data, after the step's batch.
    """

    row: dict[str, Any]
    progress: Progress
    position: Mapping[str, Any] | None


@dataclass(frozen=True)
class HeldOutLoss:
    """Holds the cross-entropy summed over the supervised tokens of a batch, and their number."""

    total: float
    num_supervised: int


class GpuWorker:
    """Computes the steps of one GPU. A plain class without Ray, which the GPU actor wraps.

    Call `fill`, `build`, `start` and then `step`, on the event loop that will run the steps. Several GPU workers get
    the same calls: they meet in `build`, and from then on do every step together.
    """

    def __init__(
        self, prepared: Prepared, holders: Sequence[Handles], fetch_batch: FetchBatch, fetch_held_out: FetchBatch,
        pinned: bool = False, seat: Seat | None = None,
    ) -> None:  # fmt: skip
        """Attach the arenas of the host and open the device.

        holders: processes that hold the arenas; at least one of them is alive.
        pinned: this worker has the process to itself, and keeps it on the CPUs of its home if the plan gives it one.
        seat: None if this is the only worker.
        """
        self._prepared = prepared
        plan = prepared.plan
        self._seat = seat
        self._rank = seat.rank if seat else 0
        host, self._host_rank = divmod(self._rank, plan.hosts.gpus_per_host)
        self._layout = prepared.structure.layout(plan.num_fragments).on_host(host, plan.hosts.num_hosts)
        self._fetch_batch = fetch_batch
        self._fetch_held_out = fetch_held_out
        self._holder = ArenaHolder.adopt(holders)
        self._arenas = {name: self._holder.map(name) for name in (WORKING, SLAB, WORDS)}
        # Must precede the start of any thread, and the registration of the slab, which touches its pages.
        self.home_problems = settle_gpu_worker(plan, self._arenas, self._host_rank, pinned=pinned)
        self._words = words_in(self._arenas[WORDS].buffer, plan, host)
        # Only the first worker of each host signals updates of layers on the device. The others get words of their own,
        # which nobody else reads.
        self._device_words = self._words
        if self._host_rank:
            self._device_words = words_in(memoryview(mmap.mmap(-1, words_bytes(plan))), plan)
        self._device_layers: DeviceLayers | None = None
        with memory_explained(plan, "opening the device"):
            self._device = make_device(plan, deterministic=prepared.config.train.deterministic)
            check_free(plan, self._device)
            if plan.hbm_layers:
                self._device_layers = DeviceLayers(prepared, self._layout, self._device, self._device_words)
                if self._rank:  # only rank 0 saves them: updates of other ranks wait for no save
                    self._device_layers.abandon_save(EVERY_ATTEMPT)
        file = self._holder.handles.get(activations_file(self._host_rank))
        self._moved = GpuDisk(file.fd if file else None)
        arenas = (handle for handle in self._holder.handles.values() if not handle.path)  # not on disk
        self._rows = StepRows(prepared, sum(handle.nbytes for handle in arenas))
        self._turn = asyncio.Condition()
        self._host: SharedHost | None = None
        self._engine: Engine | None = None
        self._group: RankGroup | None = None
        self._waits_for = ""
        self._evaluated = (0, 0)  # step after which the newest evaluation runs, and its finished batches

    def handles(self) -> dict[str, ArenaHandle]:
        """Return the handles of all arenas of the host, which this process also keeps alive."""
        return self._holder.handles

    async def fill(self, save_folder: Path | None, manifest: Manifest | None) -> None:
        """Fill the layers that live on the device, if there are any, from a save or from the model's source.

        save_folder, manifest: of the save; None: the model's source.
        """
        if self._device_layers is not None:
            await asyncio.to_thread(self._device_layers.fill, save_folder, manifest)

    async def write_part(self, save_folder: Path, attempt: SaveAttempt, compression: SaveCompression) -> WrittenPart:
        """Write the part of a save that lives on the device."""
        assert self._device_layers is not None  # else nobody calls this
        return await asyncio.to_thread(self._device_layers.write_part, save_folder, attempt, compression)

    async def abandon_save(self, attempt: SaveAttempt) -> None:
        """Abandon a save: updates on the device do not wait for it any more."""
        if self._device_layers is not None:
            self._device_layers.abandon_save(attempt)

    async def base_checksums(self) -> tuple[int | None, ...]:
        """Return the checksum of each layer's frozen part, once weights are loaded."""
        return await asyncio.to_thread(
            frozen_checksums, self._layout, self._working_of, self._prepared.plan.compute.num_threads
        )

    def _working_of(self, layer: int) -> torch.Tensor:
        """Return the working copy of a layer that is not on disk."""
        if self._device_layers is not None and layer in self._device_layers.shard.layers:
            return self._device_layers.shard.working_of(layer)
        return WorkingArena(self._prepared.plan, self._layout, self._working()).of_layer(layer)

    def _working(self) -> torch.Tensor:
        """Return the working copies in host memory, 1-D."""
        size = self._layout.size_among(self._prepared.plan.weights_on_host)
        num_bytes = size * self._prepared.plan.precision.working_dtype.itemsize
        working = torch.frombuffer(self._arenas[WORKING].buffer, dtype=torch.uint8)[:num_bytes]
        return working.view(self._prepared.plan.precision.working_dtype)

    async def build(self) -> None:
        """Build the engine and compile what steps need, once the layers on the device are filled.

        Reads nothing of the layers on the host, so shards may still be loading them.
        """
        plan, structure, layout = self._prepared.plan, self._prepared.structure, self._layout
        slab = torch.frombuffer(self._arenas[SLAB].buffer, dtype=torch.uint8)
        slab = slab[: held_slab_bytes(plan, layout) + plan.gradients.direction_slab_bytes]
        if plan.compute.compiled_loss:
            keep_compiled_graphs()
        device = self._device
        device.pin(slab)
        self._momenta = find_momenta(plan, layout, self._holder)
        self._disk = open_disk_weights(plan, layout, self._holder, self._moved.of_weights, device.spans)
        momenta = Momenta(*self._momenta)
        host = SharedHost(plan, layout, self._working(), slab, self._words, momenta, self._disk, self._rank)
        self._host = host
        if self._seat:
            self._group = await asyncio.to_thread(self._meet, self._seat)
        layers = self._device_layers
        with memory_explained(plan, "building the engine"):
            self._engine = Engine(
                self._prepared.source.factory, structure, plan, device, host,
                muon=muon_of(self._prepared.config.train),
                device_shard=layers.shard if layers else None,
                gate=layers.gate if layers else None,
                spill=open_activations(plan, self._holder, self._moved.of_activations, self._host_rank),
                ranks=self._group,
            )  # fmt: skip
            await self._engine.rehearse(self._coming())

    def _meet(self, seat: Seat) -> RankGroup:
        """Join the other GPU workers, and bound every later exchange with them.

        The bound includes that of an update, since one worker may wait for the disk of a save while the others wait for
        it.
        """
        plan = self._prepared.plan
        timeout_s = STEP_DEADLINE_S + plan.update_deadline_s
        return RankGroup(
            self._device.torch_device, seat.place, seat.rank, plan.hosts.num_gpus, timeout_s, seat.address,
            gathers=plan.slots.gathered,
        )  # fmt: skip

    async def start(self, progress: Progress) -> None:
        """Get ready for the first step, after `build`.

        progress: where the weights in the arenas stand.

        The first worker of each host resets the signal words, so it must start before the others.
        """
        if self._host_rank == 0:
            self._words.reset(progress.step, self._prepared.plan.updated_layers)
        self._begin(progress)

    async def resume(self, progress: Progress) -> None:
        """Take the place of a GPU worker that died after the steps up to `progress`. Called instead of `start`.

        The shards go on meanwhile. Raises LostProcessError if the dead worker held something that the last update
        needs, or had begun an update that the driver does not know of.
        """
        assert self._engine is not None  # build came first
        words, step = self._words, progress.step
        waits = [layer for of_shard in self._prepared.plan.updated_layers for layer in of_shard]
        if words.committed != step or not all(words.has_landed(layer, step) for layer in waits):
            raise LostProcessError(
                f"update {words.committed} had begun when the GPU worker died, and step {step} was the last that ended"
            )
        await self._engine.drain(step)
        if self._host_rank == 0:
            words.withdraw(step)
        self._begin(progress)

    def _begin(self, progress: Progress) -> None:
        if self._device_words is not self._words:
            self._device_words.reset(progress.step, self._prepared.plan.updated_layers)
        # Not before the shards have filled them, so that each page is on the NUMA node of the shard that updates it.
        windows = [] if self._disk is None else [self._disk.memory]
        for filled in (self._working(), *self._momenta[1], *windows):
            self._device.pin(filled.view(torch.uint8))
        self._progress = progress
        self._next_batch = asyncio.ensure_future(self._fetch_batch(progress.step + 1))
        self._rows.start_clock()

    def _coming(self) -> Coming:
        config = self._prepared.config
        return Coming(self._objective(), packed=config.data.packing, evaluates=config.eval_every > 0)

    def _objective(self) -> Objective:
        train = self._prepared.config.train
        return Objective(train.z_loss, train.label_smoothing)

    async def step(self, step: int, save: bool) -> StepResult:
        """Run one step.

        save: a save wants the state after this step.

        Steps may be requested early and in any order, because Ray does not keep the order of calls to an async actor.
        No step begins after one that failed.
        """
        async with self._turn:
            await self._turn.wait_for(lambda: self._progress.step == step - 1)
            assert self._engine is not None  # start came first
            await self._trace(self._engine, step in traced_steps(self._prepared.config.log.trace))
            with self._engine.device.spans.span(Row.STEPS, f"step {step}"):
                result = await self._step(self._engine, step, save)
            self._turn.notify_all()
            return result

    async def _step(self, engine: Engine, step: int, save: bool) -> StepResult:
        start = time.perf_counter()
        batch = await self._take_batch(self._next_batch, f"batch of step {step}")
        data_s = time.perf_counter() - start
        if step < self._prepared.config.train.steps:
            self._next_batch = asyncio.ensure_future(self._fetch_batch(step + 1))
        self._moved.begin_step()
        with memory_explained(self._prepared.plan, f"step {step}"):
            report = await engine.step(self._step_input(step, batch), self._settings(step, save))
        engine.device.timeline.clear()  # nobody reads these records, which take 8 KB a step
        self._progress = Progress(step, self._progress.adam_step + (not report.skipped))
        row = self._rows.row(report, batch, data_s)
        self._moved.end_step(self._rows.newest)
        return StepResult(row, self._progress, batch.position)

    async def _trace(self, engine: Engine, on: bool) -> None:
        """Begin or end the recording of spans, between two steps."""
        device = engine.device
        if on != device.spans.on:
            await engine.on_compute_thread(device.start_tracing if on else device.stop_tracing)

    async def spans(self, last: int) -> RecordedSpans:
        """Return the spans of the traced steps, once step `last` is over."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._progress.step >= last)
            assert self._engine is not None  # start came first
            await self._trace(self._engine, False)
            return self._engine.device.spans.take()

    def work(self) -> GpuWork:
        """Return what this process has read from disk and written to it, up to the newest step."""
        return self._moved.work()

    async def evaluate(self, step: int, index: int) -> HeldOutLoss:
        """Return the loss of one batch of the held-out data after the update of `step`, before the next one.

        index: number of the batch.

        Calls may come in any order. The batches run by number, from the first one on, as on every other GPU.
        """
        fetching = asyncio.ensure_future(self._fetch_held_out(index))  # while the previous batch is evaluated
        async with self._turn:
            await self._turn.wait_for(lambda: self._progress.step == step and self._num_evaluated(step) == index)
            batch = await self._take_batch(fetching, f"held-out batch {index}")
            assert self._engine is not None  # start came first
            with memory_explained(self._prepared.plan, f"evaluating after step {step}"):
                total = await self._engine.evaluate(self._micro_batches(batch), step)
            self._engine.device.timeline.clear()
            self._rows.start_clock()
            self._evaluated = step, index + 1
            self._turn.notify_all()
            return HeldOutLoss(total, batch.num_supervised)

    def _num_evaluated(self, step: int) -> int:
        """Return how many held-out batches have been evaluated after that step."""
        newest, count = self._evaluated
        return count if newest == step else 0

    async def _take_batch(self, fetching: Awaitable[Batch], name: str) -> Batch:
        self._waits_for = name
        assert self._engine is not None  # start came first
        try:
            async with asyncio.timeout(DEADLINE_S):
                with self._engine.device.spans.span(Row.STEPS, "wait data", waits=True):
                    return await fetching
        except TimeoutError:
            raise DeadlineError(f"the data process did not make the {name} within {DEADLINE_S:.0f} s") from None
        finally:
            self._waits_for = ""

    def whereabouts(self) -> str:
        """Return what the worker is doing, for the message about a step that does not end."""
        if self._waits_for:
            return f"waiting for the {self._waits_for} from the data process"
        return self._engine.whereabouts if self._engine else "building the engine"

    async def close(self, last: int = 0) -> None:
        """Wait until step `last` and its update are over, then stop all background work.

        The step may be over on rank 0, which answers for all, before it is over here.
        """
        async with self._turn:
            await self._turn.wait_for(lambda: self._progress.step >= last)
        self._next_batch.cancel()
        assert self._engine is not None  # start came first
        await self._engine.drain(self._progress.step)
        await self.abandon()

    async def abandon(self) -> None:
        """Stop all background work and release host memory.

        Call it directly after a failure, in a process that goes on.
        """
        if self._host:
            await self._host.close()
        if self._device_layers:
            self._device_layers.close()
        if self._engine:
            await self._engine.close()
        else:
            self._device.close()
        if self._group:
            self._group.close()
        self._holder.close()

    def _step_input(self, step: int, batch: Batch) -> StepInput:
        micro_batches = self._micro_batches(batch)
        seed = self._prepared.config.train.seed
        world = World(batch.num_supervised, self._rank, self._prepared.plan.hosts.num_gpus)
        return StepInput(step, micro_batches, world, seed, self._objective())

    def _micro_batches(self, batch: Batch) -> tuple[MicroBatch, ...]:
        """Return the micro-batches of this rank. Every rank has the same number."""
        of_all = micro_batches_of(batch, self._prepared.plan.step.micro_batch_size)
        count = len(of_all) // self._prepared.plan.hosts.num_gpus
        return of_all[self._rank * count : (self._rank + 1) * count]

    def _settings(self, step: int, save: bool) -> UpdateSettings:
        train = self._prepared.config.train
        return UpdateSettings(self._rows.learning_rate(step), self._progress.adam_step + 1, train.clip, save)
