"""Runs the process of one GPU: it attaches and pins arenas, and runs an engine on its event loop."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch

from megatrain_ray.accounting.work_counters import WorkColumns
from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.data.rollout_stream import compared_logprobs
from megatrain_ray.engine.device.deadlines import STEP_DEADLINE_S
from megatrain_ray.engine.device.rank_group import RankGroup
from megatrain_ray.engine.host.gradient_slab import held_slab_bytes
from megatrain_ray.engine.host.shared_host import Momenta, SharedHost, WorkingArena
from megatrain_ray.engine.layer_calls.compiled_call import keep_compiled_graphs
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.shards.save_gate import EVERY_ATTEMPT, SaveAttempt, WrittenPart
from megatrain_ray.engine.step.build_engine import build_engine
from megatrain_ray.engine.step.engine import Engine
from megatrain_ray.engine.step.sampler import Completion, Prompt, SamplingParams
from megatrain_ray.engine.step.warm_up import WarmUpShapes
from megatrain_ray.engine.weights.frozen_checksums import frozen_checksums
from megatrain_ray.errors import LostProcessError
from megatrain_ray.io.arenas.arena_holder import ArenaHandle, ArenaHolder, Handles
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.storage.measured_store import DiskMeter
from megatrain_ray.metrics.step_rows import StepRows
from megatrain_ray.model.engine_settings import muon_of, objective_of
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.rollouts.answer_scores import SampledAnswer
from megatrain_ray.spans import RecordedSpans
from megatrain_ray.workers import arenas
from megatrain_ray.workers.arenas import COUNTERS, SHARED, SLAB, WORDS, WORKING
from megatrain_ray.workers.device_layers import DeviceLayers
from megatrain_ray.workers.gpu_steps import FetchBatch, GpuSteps, Scores
from megatrain_ray.workers.messages import HeldOutLoss, Progress, RankInfo, StepResult
from megatrain_ray.workers.numa_binding import bind_gpu_worker
from megatrain_ray.workers.open_device import check_free, make_device, memory_explained
from megatrain_ray.workers.served_weights import ServedWeights
from megatrain_ray.workers.server_sampler import ServerSampler


class GpuWorker:
    """Computes the steps of one GPU. A plain class without Ray, which the GPU actor wraps.

    Call `fill`, `build`, `start` and then `step`, on the event loop that will run the steps. Several GPU workers get
    the same calls: they meet in `build`, and from then on do every step together.
    """

    def __init__(
        self, run_spec: RunSpec, holders: Sequence[Handles], fetch_batch: FetchBatch, fetch_held_out: FetchBatch,
        pinned: bool = False, rank_info: RankInfo | None = None,
    ) -> None:  # fmt: skip
        """Attach the arenas of the host and open the device.

        holders: processes that hold the arenas; at least one of them is alive.
        pinned: this worker has the process to itself, and keeps it on the CPUs of its home if the plan gives it one.
        rank_info: None if this is the only worker.
        """
        self._run_spec = run_spec
        plan = run_spec.plan
        self._rank_info = rank_info
        self._rank = rank_info.rank if rank_info else 0
        host, self._host_rank = divmod(self._rank, plan.hosts.gpus_per_host)
        self._layout = run_spec.structure.layout(plan.num_fragments).on_host(host, plan.hosts.num_hosts)
        self._fetch_batch = fetch_batch
        self._fetch_held_out = fetch_held_out
        self._holder = ArenaHolder.adopt(holders)
        self._arenas = {name: self._holder.map(name) for name in SHARED}
        # Must precede the start of any thread, and the registration of the slab, which touches its pages.
        self._home_problems = bind_gpu_worker(plan, self._arenas, self._host_rank, pinned=pinned)
        self._words = arenas.words_in(self._arenas[WORDS].buffer, plan, host)
        # Only the first worker of each host signals updates of layers on the device. The others get words of their own,
        # which nobody else reads.
        self._device_words = self._words
        if self._host_rank:
            self._device_words = arenas.words_in(memoryview(mmap.mmap(-1, arenas.words_bytes(plan))), plan)
        self._device_layers: DeviceLayers | None = None
        with memory_explained(plan, "opening the device"):
            self._device = make_device(plan, deterministic=run_spec.config.train.deterministic)
            check_free(plan, self._device)
            if plan.hbm_layers:
                self._device_layers = DeviceLayers(run_spec, self._layout, self._device, self._device_words)
                if self._rank:  # only rank 0 saves them: updates of other ranks wait for no save
                    self._device_layers.abandon_save(EVERY_ATTEMPT)
        self._counters = arenas.counters_in(self._arenas[COUNTERS].buffer, plan)
        own = self._counters.gpus[self._host_rank]
        self._weights_meter, self._activations_meter = DiskMeter(own["weights"]), DiskMeter(own["activations"])
        self._host: SharedHost | None = None
        self._engine: Engine | None = None
        self._group: RankGroup | None = None
        self._steps: GpuSteps | None = None

    def handles(self) -> dict[str, ArenaHandle]:
        return self._holder.handles

    def home_problems(self) -> tuple[str, ...]:
        return self._home_problems

    async def fill(self, save_folder: Path | None, manifest: Manifest | None) -> None:
        """Fill the layers that live on the device, if there are any, from a save, or without one from the model."""
        if self._device_layers is not None:
            await asyncio.to_thread(self._device_layers.fill, save_folder, manifest)

    async def write_part(self, save_folder: Path, attempt: SaveAttempt, compression: SaveCompression) -> WrittenPart:
        """Write the part of a save that lives on the device."""
        assert self._device_layers is not None  # else nobody calls this
        return await asyncio.to_thread(self._device_layers.write_part, save_folder, attempt, compression)

    async def abandon_save(self, attempt: SaveAttempt) -> None:
        if self._device_layers is not None:
            self._device_layers.abandon_save(attempt)

    async def base_checksums(self) -> tuple[int | None, ...]:
        """Return the checksum of each layer's frozen part, once weights are loaded."""
        num_threads = self._run_spec.plan.compute.num_threads
        return await asyncio.to_thread(frozen_checksums, self._layout, self._working_of, num_threads)

    def _working_of(self, layer: int) -> torch.Tensor:
        if self._device_layers is not None and layer in self._device_layers.shard.layers:
            return self._device_layers.shard.working_of(layer)
        return WorkingArena(self._run_spec.plan, self._layout, self._working()).of_layer(layer)

    def _working(self) -> torch.Tensor:
        """Return the working copies in host memory, 1-D."""
        size = self._layout.size_among(self._run_spec.plan.weights_on_host)
        return arenas.working_copies(self._arenas[WORKING], size, self._run_spec.plan.precision)

    async def build(self) -> None:
        """Build the engine and compile what steps need, once the layers on the device are filled.

        Reads nothing of the layers on the host, so shards may still be loading them.
        """
        plan, structure, layout = self._run_spec.plan, self._run_spec.structure, self._layout
        slab_bytes = held_slab_bytes(plan, layout) + plan.gradients.direction_slab_bytes
        slab = arenas.tensor_of(self._arenas[SLAB])[:slab_bytes]
        if plan.compute.compiled_loss:
            keep_compiled_graphs()
        device = self._device
        device.pin(slab)
        self._momenta = arenas.find_momenta(plan, layout, self._holder)
        self._disk = arenas.open_disk_weights(plan, layout, self._holder, self._weights_meter, device.spans)
        momenta = Momenta(*self._momenta)
        host = SharedHost(plan, layout, self._working(), slab, self._words, momenta, self._disk, self._rank)
        self._host = host
        if self._rank_info:
            self._group = await asyncio.to_thread(self._meet, self._rank_info)
        layers = self._device_layers
        with memory_explained(plan, "building the engine"):
            self._engine = build_engine(
                self._run_spec.source.factory, structure, plan, device, host,
                muon=muon_of(self._run_spec.config.train),
                device_shard=layers.shard if layers else None,
                gate=layers.gate if layers else None,
                spill=arenas.open_activations(plan, self._holder, self._activations_meter, self._host_rank),
                ranks=self._group,
            )  # fmt: skip
            config = self._run_spec.config
            objective = objective_of(config, self._run_spec.teacher)
            shapes = WarmUpShapes(
                objective,
                packed=config.data.packing,
                row_parts=2 if config.data.in_pairs and not config.data.packing else 1,
                weighted=self._run_spec.weighted,
                # KTO's KL is of a forward, and so are log-probabilities of a run's own answers.
                evaluates=config.evaluates or config.data.is_labelled or bool(compared_logprobs(config.train)),
                trains=config.train.num_steps > 0,
                teacher=self._run_spec.teacher,
                images=config.data.images,
            )
            await self._engine.run_warm_up(shapes)

    def _meet(self, info: RankInfo) -> RankGroup:
        """Join the other GPU workers, and bound every later exchange with them."""
        plan = self._run_spec.plan
        timeout_s = STEP_DEADLINE_S + plan.update_deadline_s  # one of them may wait for the disk of a save
        return RankGroup(
            self._device.torch_device, info.place, info.rank, plan.hosts.num_gpus, timeout_s, info.address,
            gathers=plan.slots.gathered,
        )  # fmt: skip

    async def start(self, progress: Progress) -> None:
        """Get ready for the first step, after `build`. `progress`: where the weights in the arenas stand."""
        if self._host_rank == 0:  # so it must start before the other workers of its host
            self._words.reset(progress.step, self._run_spec.plan.updated_layers)
        self._begin(progress)

    async def resume(self, progress: Progress) -> None:
        """Take the place of a GPU worker that died after the steps up to `progress`. Called instead of `start`.

        The shards go on meanwhile. Raises LostProcessError if the dead worker held something that the last update
        needs, or had begun an update that the driver does not know of.
        """
        assert self._engine is not None  # build came first
        words, step = self._words, progress.step
        updated = chain.from_iterable(self._run_spec.plan.updated_layers)
        if words.updates.committed != step or not all(words.gradients.has_landed(layer, step) for layer in updated):
            raise LostProcessError(
                f"update {words.updates.committed} had begun when the GPU worker died, and step {step} was the last "
                "that ended"
            )
        await self._engine.drain(step)
        if self._host_rank == 0:
            words.gradients.withdraw(step)
        self._begin(progress)

    def _begin(self, progress: Progress) -> None:
        if self._device_words is not self._words:
            self._device_words.reset(progress.step, self._run_spec.plan.updated_layers)
        # Not before the shards have filled them, so that each page is on the NUMA node of the shard that updates it.
        staging = [] if self._disk is None else [self._disk.memory]
        for filled in (self._working(), *self._momenta[1], *staging):
            self._device.pin(filled.view(torch.uint8))
        assert self._engine is not None  # build came first
        handles = self._holder.handles
        file = handles.get(arenas.activations_file(self._host_rank))
        uses_disk = self._run_spec.plan.total_bytes(Tier.NVME) > 0
        work = WorkColumns(self._counters, self._host_rank, file.fd if file else None, uses_disk=uses_disk)
        rows = StepRows(self._run_spec, sum(handle.nbytes for handle in handles.values() if not handle.path))
        self._steps = GpuSteps(
            self._run_spec, self._engine, self._rank, self._fetch_batch, self._fetch_held_out, rows, work, progress,
            self._server_sampler(self._engine),
        )  # fmt: skip

    def _server_sampler(self, engine: Engine) -> ServerSampler | None:
        """Return what samples in place of the engine, if the run has a server for it."""
        run_spec, loop = self._run_spec, asyncio.get_running_loop()
        rollouts, folder = run_spec.config.train.rollouts, run_spec.weights_folder
        if rollouts is None or rollouts.server is None or folder is None:
            return None

        def flat_of(layer: int) -> torch.Tensor:  # in a thread
            if layer in run_spec.plan.weights_on_disk:
                return asyncio.run_coroutine_threadsafe(engine.read_from_disk(layer), loop).result()
            return self._working_of(layer)

        return ServerSampler(rollouts.server, folder, engine, ServedWeights(run_spec, self._layout, flat_of).write)

    async def step(self, step: int, save: bool) -> StepResult:
        return await self._started.step(step, save)

    async def evaluate(self, step: int, index: int) -> HeldOutLoss:
        return await self._started.evaluate(step, index)

    async def sample(self, step: int, prompts: list[Prompt], sampling: SamplingParams) -> list[Completion]:
        return await self._started.sample(step, prompts, sampling)

    async def score(self, step: int, answers: list[SampledAnswer]) -> Scores:
        return await self._started.score(step, answers)

    async def spans(self, last: int) -> RecordedSpans:
        return await self._started.spans(last)

    @property
    def _started(self) -> GpuSteps:
        assert self._steps is not None  # start or resume came first
        return self._steps

    def current_phase(self) -> str:
        """Return what the worker is doing, for the message about a step that does not end."""
        if self._steps and self._steps.current_phase:
            return self._steps.current_phase
        return self._engine.current_phase if self._engine else "building the engine"

    async def close(self, last: int = 0) -> None:
        """Wait until step `last` and its update are over on this rank too, then stop all background work."""
        await self._started.finish(last)
        await self.abandon()

    async def abandon(self) -> None:
        """Stop all background work and release host memory. Call it directly after a failure."""
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
