"""Opens what the GPU worker reads of the shards (working copies on disk, momenta), and its own file of activations."""

from __future__ import annotations

import torch

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_shards import shard_layout, spill_layout
from megatrain_ray.engine.spill.disk_weights import DiskWeights, ShardFile
from megatrain_ray.engine.spill.spill_table import SpillTable
from megatrain_ray.io.arenas.arena_holder import ArenaHolder
from megatrain_ray.io.storage.blob_store import BlobStore
from megatrain_ray.io.storage.measured_store import DiskMeter, MeasuredStore
from megatrain_ray.spans import SpanLog
from megatrain_ray.workers.arenas import (
    activations_file,
    spill_file,
    spill_memory,
    state_arena,
    state_views,
)


def open_disk_weights(
    plan: Plan, layout: ModelLayout, holder: ArenaHolder, meter: DiskMeter, spans: SpanLog
) -> DiskWeights | None:
    """Open the working copies that are on disk; return None if there are none.

    holder: of the run's arenas and files; must stay open as long as the weights are read.
    meter: counts the bytes that are read.
    """
    if not plan.weights_on_disk:
        return None
    files = []
    for k in range(plan.shards.num_shards):
        part = shard_layout(plan, layout, k)
        on_disk = spill_layout(plan, part)
        if on_disk.layers:
            arena = torch.frombuffer(holder.map(state_arena(k)).buffer, dtype=torch.uint8)
            table = SpillTable(on_disk, spill_memory(arena, plan, part))
            store, name = holder.spill(spill_file(k), plan.disk.io)
            store = table.packing(store) if plan.disk.packed else store
            files.append(ShardFile(on_disk, table, MeasuredStore(store, meter), name))
    return DiskWeights(plan, layout, files, spans=spans)


def open_activations(plan: Plan, holder: ArenaHolder, meter: DiskMeter, host_rank: int) -> tuple[BlobStore, str] | None:
    """Return store and name of the file in which a GPU worker keeps activations, or None if none go to disk.

    host_rank: of the worker among those of its host.
    meter: counts the bytes that move.
    """
    if not plan.disk_activations:
        return None
    store, name = holder.spill(activations_file(host_rank), plan.disk.io)
    return MeasuredStore(store, meter), name


def find_momenta(plan: Plan, layout: ModelLayout, holder: ArenaHolder) -> tuple[list[ShardLayout], list[torch.Tensor]]:
    """Return the shards' layouts and momenta, both empty unless Muon trains something."""
    parts, tensors = [], []
    for k in range(plan.shards.num_shards if plan.num_muon else 0):
        part = shard_layout(plan, layout, k)
        arena = torch.frombuffer(holder.map(state_arena(k)).buffer, dtype=torch.uint8)
        parts.append(part)
        tensors.append(state_views(arena, part, plan.precision)["m"])
    return parts, tensors
