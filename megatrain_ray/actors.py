"""Ray actors: thin wrappers of plain classes, their resources, and their placement. Bytes never travel through them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatrain_ray.arena_owner import ArenaOwner
from megatrain_ray.arenas import arena_sizes
from megatrain_ray.config import SaveCompression
from megatrain_ray.data_worker import DataWorker
from megatrain_ray.engine.deadlines import DEADLINE_S
from megatrain_ray.engine.save_gate import SaveAttempt
from megatrain_ray.errors import DeadlineError
from megatrain_ray.gpu_worker import GpuWorker, HeldOutLoss, Progress, StepResult
from megatrain_ray.io.arena import ArenaHandle
from megatrain_ray.io.arena_holder import Handles
from megatrain_ray.io.batches import Batch
from megatrain_ray.io.manifest import Manifest
from megatrain_ray.part_writer import WrittenPart
from megatrain_ray.planning import Prepared
from megatrain_ray.shard_worker import ShardWorker
from megatrain_ray.spans import RecordedSpans

# Actors change state: a call that failed must not be repeated by Ray.
ONCE: Mapping[str, Any] = {"max_restarts": 0, "max_task_retries": 0}


class GpuActor:
    """GpuWorker on this actor's event loop."""

    def __init__(self, prepared: Prepared, holders: Sequence[Handles], data: Any) -> None:
        async def fetch(step: int) -> Batch:
            batch: Batch = await data.batch.remote(step)
            return batch

        async def fetch_held_out(index: int) -> Batch:
            batch: Batch = await data.held_out_batch.remote(index)
            return batch

        self._worker = GpuWorker(prepared, holders, fetch, fetch_held_out)

    async def handles(self) -> dict[str, ArenaHandle]:
        return self._worker.handles()

    async def fill(self, save_folder: Path | None, manifest: Manifest | None) -> None:
        await self._worker.fill(save_folder, manifest)

    async def write_part(self, save_folder: Path, attempt: SaveAttempt, compression: SaveCompression) -> WrittenPart:
        return await self._worker.write_part(save_folder, attempt, compression)

    async def abandon_save(self, attempt: SaveAttempt) -> None:
        await self._worker.abandon_save(attempt)

    async def base_checksums(self) -> tuple[int | None, ...]:
        return await self._worker.base_checksums()

    async def start(self, progress: Progress) -> None:
        await self._worker.start(progress)
        # Python's full collections would go over half a million objects of torch and Transformers, 0.3 s each, while
        # the GPU runs dry. These stay as long as the process does.
        gc.collect()
        gc.freeze()

    async def step(self, step: int, save: bool) -> StepResult:
        return await self._worker.step(step, save)

    async def evaluate(self, step: int, index: int) -> HeldOutLoss:
        return await self._worker.evaluate(step, index)

    async def spans(self, last: int) -> RecordedSpans:
        return await self._worker.spans(last)

    async def whereabouts(self) -> str:
        return self._worker.whereabouts()

    async def close(self) -> None:
        await self._worker.close()


class Placement:
    """Where a run's actors are placed, and how each of them is made."""

    def __init__(self, prepared: Prepared) -> None:
        """Raises DeadlineError when the cluster has no room for them."""
        self._prepared = prepared
        plan = prepared.plan
        self._gpu = {"GPU": 1.0} if plan.device == "cuda" else {}
        # Ray's CPUs are a promise of room; threads are the plan's. Fractions, so that small machines can run all.
        bundles = [{"CPU": 0.1, **self._gpu}, *({"CPU": 0.1} for _ in range(plan.num_shards))]
        self._group = placement_group(bundles, "STRICT_PACK")
        if not self._group.wait(DEADLINE_S):
            raise DeadlineError(f"the cluster found no room for {bundles} on one machine within {DEADLINE_S:.0f} s")

    def owner(self, holders: Sequence[Handles], after_pid: int | None) -> Any:
        """Of new arenas, or of those that `holders` still hold. It maps nothing, so whom it follows does not matter."""
        plan, structure = self._prepared.plan, self._prepared.structure
        sizes = arena_sizes(plan, structure.layout(plan.num_fragments))
        # run, handles and stop
        return ray.remote(ArenaOwner).options(**ONCE, num_cpus=0, max_concurrency=3).remote(sizes, holders)

    def shard_maker(self, index: int) -> Callable[[Sequence[Handles], int | None], Any]:
        # run, write_part, spans, and what must be answered meanwhile
        options = self._place(1 + index, max_concurrency=5)

        def make(holders: Sequence[Handles], after_pid: int | None) -> Any:
            return ray.remote(ShardWorker).options(**options).remote(self._prepared, index, holders, after_pid)

        return make

    def data(self, arguments: Mapping[str, Any]) -> Any:
        return ray.remote(DataWorker).options(**ONCE, num_cpus=0).remote(**arguments)

    def gpu(self, holders: Sequence[Handles], data: Any) -> Any:
        options = self._place(0, num_gpus=1 if self._gpu else 0)
        return ray.remote(GpuActor).options(**options).remote(self._prepared, holders, data)

    def clear(self) -> None:
        """Gives the room back, after the actors have ended."""
        remove_placement_group(self._group)

    def _place(self, bundle: int, **options: Any) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {**ONCE, "num_cpus": 0.1, "scheduling_strategy": strategy, **options}
