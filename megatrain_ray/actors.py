"""Ray actors: thin wrappers of plain classes, their resources, and their placement. Bytes never travel through them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatrain_ray.arena_owner import ArenaOwner, arena_sizes
from megatrain_ray.data_worker import DataWorker
from megatrain_ray.engine.device import DEADLINE_S
from megatrain_ray.errors import MegatrainError
from megatrain_ray.gpu_worker import GpuWorker, Progress
from megatrain_ray.io.arena import ArenaHandle
from megatrain_ray.io.batches import Batch
from megatrain_ray.io.manifest import Manifest, PartManifest
from megatrain_ray.planning import Prepared
from megatrain_ray.shard_worker import ShardWorker

# Actors change state: a call that failed must not be repeated by Ray.
ONCE: Mapping[str, Any] = {"max_restarts": 0, "max_task_retries": 0}


class GpuActor:
    """GpuWorker on this actor's event loop."""

    def __init__(self, prepared: Prepared, handles: Mapping[str, ArenaHandle], data: Any) -> None:
        async def fetch(step: int) -> Batch:
            batch: Batch = await data.batch.remote(step)
            return batch

        self._worker = GpuWorker(prepared, handles, fetch)

    async def start(self, progress: Progress) -> None:
        await self._worker.start(progress)

    async def step(self, step: int) -> dict[str, Any]:
        return await self._worker.step(step)

    async def drain(self) -> Progress:
        return await self._worker.drain()

    async def close(self) -> None:
        await self._worker.close()


@dataclass
class Actors:
    """Handles of everything that runs for a training run."""

    owner: Any
    data: Any
    shards: list[Any]
    gpu: Any
    group: Any
    serving: list[Any]  # of each shard's `run`: an answer means that it failed or was stopped

    @staticmethod
    def start(prepared: Prepared, data_arguments: Mapping[str, Any]) -> Actors:
        """Places and starts all actors; weights are not loaded yet."""
        plan = prepared.plan
        gpu = {"GPU": 1.0} if plan.device == "cuda" else {}
        # Ray's CPUs are a promise of room; threads are the plan's. Fractions, so that small machines can run all.
        group = placement_group([{"CPU": 0.1, **gpu}, *({"CPU": 0.1} for _ in range(plan.num_shards))], "STRICT_PACK")
        ray.get(group.ready(), timeout=DEADLINE_S)

        def place(bundle: int, **options: Any) -> dict[str, Any]:
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            return {**ONCE, "num_cpus": 0.1, "scheduling_strategy": strategy, **options}

        owner = (
            ray.remote(ArenaOwner)
            .options(**ONCE, num_cpus=0)
            .remote(arena_sizes(plan, prepared.structure.layout(plan.num_fragments)))
        )
        data = ray.remote(DataWorker).options(**ONCE, num_cpus=0).remote(**data_arguments)
        handles = ray.get(owner.handles.remote(), timeout=DEADLINE_S)
        shards = [
            ray.remote(ShardWorker).options(**place(1 + k, max_concurrency=3)).remote(prepared, k, handles)
            for k in range(plan.num_shards)
        ]
        num_gpus = 1 if gpu else 0
        worker = ray.remote(GpuActor).options(**place(0, num_gpus=num_gpus)).remote(prepared, handles, data)
        return Actors(owner, data, shards, worker, group, [])

    def load(self, save_folder: Path | None, manifest: Manifest | None) -> None:
        """Fills every shard: from a save, or from the model's source."""
        if save_folder is None:
            calls = [shard.initialize.remote() for shard in self.shards]
        else:
            calls = [shard.restore.remote(save_folder, manifest) for shard in self.shards]
        ray.get(calls)

    def begin(self, progress: Progress) -> None:
        """Starts the engine, which resets the signal words, and then the shards that obey them."""
        ray.get(self.gpu.start.remote(progress))
        self.serving = [shard.run.remote(progress.step) for shard in self.shards]

    def write_parts(self, save_folder: Path) -> tuple[PartManifest, ...]:
        """All shards write their parts at the same time."""
        return tuple(ray.get([shard.write_part.remote(save_folder) for shard in self.shards]))

    def answer(self, call: Any) -> Any:
        """What a call returns, unless a shard that should be serving ends first. Raises what that one raised."""
        ended, _ = ray.wait([call, *self.serving], num_returns=1)
        result = ray.get(ended[0])
        if ended[0] != call:
            raise MegatrainError("an optimizer shard stopped serving before the run was over")
        return result

    def failures(self, within_s: float = 2.0) -> list[Exception]:
        """What the shards' calls raised, given a moment: what made a shard fail may arrive after what followed."""
        if not self.serving:
            return []
        ended, _ = ray.wait(self.serving, num_returns=1, timeout=within_s)
        found = []
        for call in ended:
            try:
                ray.get(call)
            except Exception as error:
                found.append(error)
        return found

    def name_of(self, actor_id: str | None) -> str:
        """Which process of the run that is."""
        named = {"GPU worker": self.gpu, "data": self.data, "arena owner": self.owner}
        named |= {f"optimizer shard {k}": shard for k, shard in enumerate(self.shards)}
        return next((name for name, actor in named.items() if actor._actor_id.hex() == actor_id), "one of Ray's")

    def stop(self) -> None:
        """Ends a run that went well: everybody closes what they hold, then the processes end."""
        ray.get(self.gpu.close.remote(), timeout=DEADLINE_S)
        ray.get([shard.stop.remote() for shard in self.shards], timeout=DEADLINE_S)
        ray.get(self.serving, timeout=DEADLINE_S)

    def kill(self) -> None:
        """Ends the processes whatever their state. Idempotent."""
        for actor in (self.gpu, *self.shards, self.data, self.owner):
            ray.kill(actor)
        remove_placement_group(self.group)
