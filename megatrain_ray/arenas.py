"""The arenas of a run: their names, their sizes, and where the kinds of a shard's state lie in its own."""

from __future__ import annotations

import torch

from megatrain_ray.engine.host_words import HostWords
from megatrain_ray.engine.journal import Journal
from megatrain_ray.engine.layout import ModelLayout
from megatrain_ray.engine.plan import Plan, Precision
from megatrain_ray.engine.shard_layout import ShardLayout

WORKING = "working"
SLAB = "slab"
WORDS = "words"


def state_arena(shard: int) -> str:
    return f"state-{shard}"


def journal_arena(shard: int) -> str:
    return f"journal-{shard}"


def arena_sizes(plan: Plan, layout: ModelLayout) -> dict[str, int]:
    """Bytes of every arena of a run: three that all map, and two for each shard that only this one does, but for its
    momenta, which the GPU worker reads where Muon trains."""
    sizes = {
        WORKING: max(1, layout.size_among(plan.host_layers)) * plan.precision.working_dtype.itemsize,
        SLAB: max(1, plan.slab_bytes + plan.direction_slab_bytes),  # none where everything lives on the device
        WORDS: 8 * HostWords.num_words(len(layout.layers), len(plan.updated_layers)),
    }
    for k in range(plan.num_shards):
        part = shard_layout(plan, layout, k)
        sizes[state_arena(k)] = max(1, part.num_bytes(plan.precision.state_kinds))  # none where little is trained
        sizes[journal_arena(k)] = Journal.num_bytes(part, plan.precision, plan.num_shard_threads)
    return sizes


def shard_layout(plan: Plan, layout: ModelLayout, index: int) -> ShardLayout:
    """Of a shard of the CPU: of the layers on the host."""
    return ShardLayout(layout, index, plan.num_shards, plan.shard_cut_elements, plan.host_layers)


def state_views(arena: torch.Tensor, part: ShardLayout, precision: Precision) -> dict[str, torch.Tensor]:
    """The kinds of a shard's state, one after the other in its arena (1-D uint8)."""
    views, start = {}, 0
    for kind, dtype in precision.state_kinds:
        stop = start + part.size_of(kind) * dtype.itemsize
        views[kind] = arena[start:stop].view(dtype)
        start = stop
    return views
