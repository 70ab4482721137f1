"""Where the GPU worker finds working copies that are on disk: the shards' files, and the tables in their arenas."""

from __future__ import annotations

import torch

from megatrain_ray.arenas import shard_layout, spill_file, spill_layout, spill_memory, state_arena
from megatrain_ray.engine.disk_weights import DiskWeights, ShardFile
from megatrain_ray.engine.layout import ModelLayout
from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.spill_table import SpillTable
from megatrain_ray.io.arena_holder import ArenaHolder


def open_disk_weights(plan: Plan, layout: ModelLayout, holder: ArenaHolder) -> DiskWeights | None:
    """None where no working copy is on disk. `holder`: of the run's arenas and files, open as long as they are read."""
    if not plan.weights_on_disk:
        return None
    files = []
    for k in range(plan.num_shards):
        part = shard_layout(plan, layout, k)
        on_disk = spill_layout(plan, part)
        if on_disk.layers:
            arena = torch.frombuffer(holder.map(state_arena(k)).buffer, dtype=torch.uint8)
            table = SpillTable(on_disk, spill_memory(arena, plan, part))
            store, name = holder.spill(spill_file(k), plan.disk_io)
            files.append(ShardFile(on_disk, table, table.packing(store) if plan.disk_packed else store, name))
    return DiskWeights(plan, layout, files)
