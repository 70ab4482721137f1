"""Runs the steps of a training without Ray: GPU worker, optimizer shards and data in this process.

Each is the class that an actor wraps, and they use the same kind of shared memory. The time by which a run with Ray is
slower is the cost of its processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from megatrain_ray.data.data_worker import DataWorker
from megatrain_ray.engine.shards.save_gate import NO_ATTEMPT
from megatrain_ray.io.arenas.arena_holder import ArenaHolder, Handles
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.workers.arenas import arena_sizes, spill_files
from megatrain_ray.workers.gpu_steps import FetchBatch
from megatrain_ray.workers.gpu_worker import GpuWorker
from megatrain_ray.workers.messages import Progress
from megatrain_ray.workers.shard_worker import ShardWorker


def run_in_process(run_spec: RunSpec, tokens: Sequence[Path]) -> list[dict[str, Any]]:
    """Run all `train.steps` from the model's initial weights on tokenized sources, and return the rows of metrics."""
    return asyncio.run(_run(run_spec, tokens))


async def _run(run_spec: RunSpec, tokens: Sequence[Path]) -> list[dict[str, Any]]:
    plan = run_spec.plan
    layout = run_spec.structure.layout(plan.num_fragments)
    files = spill_files(plan, layout, run_spec.config.spill.path)
    owner = ArenaHolder.create(arena_sizes(plan, layout), files)
    shards = [_shard(run_spec, k, owner.handles) for k in range(plan.shards.num_shards)]
    with ThreadPoolExecutor(plan.shards.num_shards, thread_name_prefix="optimizer") as threads:
        worker = GpuWorker(run_spec, [owner.handles], _batches(run_spec, tokens), _nothing_held_out)
        serving: list[Future[None]] = []
        try:
            await worker.fill(None, None)
            await worker.build()
            await worker.start(Progress(0, 0))
            serving += [threads.submit(shard.run, NO_ATTEMPT) for shard in shards]
            steps = range(1, run_spec.config.train.num_steps + 1)
            rows = [(await worker.step(step, save=False)).row for step in steps]
            await worker.close()
        except BaseException:
            await worker.abandon()
            raise
        finally:
            for shard in shards:
                shard.stop()
            await asyncio.to_thread(wait, serving)
            for shard in shards:
                shard.close()
            owner.close()
        for served in serving:
            served.result()
    return rows


def _shard(run_spec: RunSpec, index: int, handles: Handles) -> ShardWorker:
    """Create and initialize one shard.

    Call it for one shard after the other: Transformers imports its modules on first use, and that is not thread-safe.
    """
    shard = ShardWorker(run_spec, index, [handles])
    shard.initialize()
    return shard


def _batches(run_spec: RunSpec, tokens: Sequence[Path]) -> FetchBatch:
    """Return a function that draws batches in a thread, so that they are drawn while a step runs.

    In a run with Ray another process draws them meanwhile.
    """
    plan, vocab_size = run_spec.plan, run_spec.structure.vocab_size
    data = DataWorker(run_spec.config.data, tokens, vocab_size, plan.batch_size, 0, None)

    async def fetch(step: int) -> Batch:
        return await asyncio.to_thread(data.batch, step)

    return fetch


async def _nothing_held_out(index: int) -> Batch:
    raise ValueError(f"held-out batch {index} was asked for, and nothing is evaluated")
