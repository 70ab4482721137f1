"""Names the arenas and spill files of a run, computes their sizes, and finds a shard's state in its arena."""

from __future__ import annotations

from pathlib import Path

import torch

from megatrain_ray.engine.host.gradient_slab import held_slab_bytes
from megatrain_ray.engine.host.signal_words import HostWords
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.undo_log import Journal
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_shards import shard_layout, spill_layout
from megatrain_ray.io.storage.blob_store import aligned
from megatrain_ray.io.storage.spill_file import SpillFile
from megatrain_ray.io.words.atomic_words import WORD_BYTES

WORKING = "working"
SLAB = "slab"
WORDS = "words"


def state_arena(shard: int) -> str:
    return f"state-{shard}"


def journal_arena(shard: int) -> str:
    return f"journal-{shard}"


def spill_file(shard: int) -> str:
    return f"spill-{shard}"


def activations_file(host_rank: int) -> str:
    """Return the name of a GPU worker's file of activations on disk. Each worker of a host has one."""
    return f"spill-activations-{host_rank}"


def arena_sizes(plan: Plan, layout: ModelLayout) -> dict[str, int]:
    """Return the bytes of every arena of a host, by name.

    layout: of that host.

    Three arenas are mapped by all processes of the host. Each shard has two more, which only it maps, except that the
    GPU worker reads the shard's momenta if Muon trains something.
    """
    slab_bytes = held_slab_bytes(plan, layout) + plan.gradients.direction_slab_bytes
    sizes = {
        WORKING: max(1, layout.size_among(plan.weights_on_host)) * plan.precision.working_dtype.itemsize,
        SLAB: max(1, slab_bytes),  # 0 bytes are needed if everything lives on the device
        WORDS: words_bytes(plan),
    }
    for k in range(plan.shards.num_shards):
        part = shard_layout(plan, layout, k)
        # 0 bytes are needed if little is trained.
        sizes[state_arena(k)] = max(1, _first_slot(part, plan) + spill_layout(plan, part).memory_bytes)
        sizes[journal_arena(k)] = Journal.num_bytes(part, plan.precision, plan.shards.num_threads)
    return sizes


def words_bytes(plan: Plan) -> int:
    return WORD_BYTES * HostWords.num_words(len(plan.layers), len(plan.updated_layers), plan.hosts.gpus_per_host)


def words_in(buffer: memoryview, plan: Plan, host: int = 0) -> HostWords:
    """Return the signal words of a host.

    buffer: shared memory of at least `words_bytes` bytes.
    """
    return HostWords(
        buffer, len(plan.layers), len(plan.updated_layers), plan.hosts.gpus_per_host, host * plan.shards.num_shards
    )


def spill_files(plan: Plan, layout: ModelLayout, folder: str | None) -> dict[str, SpillFile]:
    """Return a spill file for each shard that has something on disk, and one for each GPU's activations, by name.

    folder: spill.path. It is made absolute here, since other processes have other working directories.
    """
    shards = range(plan.shards.num_shards)
    num_bytes = {spill_file(k): spill_layout(plan, shard_layout(plan, layout, k)).blob_bytes for k in shards}
    num_bytes |= {activations_file(k): plan.activation_file_bytes for k in range(plan.hosts.gpus_per_host)}
    return {name: SpillFile(Path(folder or ".").absolute(), nbytes) for name, nbytes in num_bytes.items() if nbytes}


def spill_memory(arena: torch.Tensor, plan: Plan, part: ShardLayout) -> torch.Tensor:
    """Return the memory in a shard's arena through which spilled state passes. It follows the state that stays there.

    arena: 1-D uint8.
    """
    first = _first_slot(part, plan)
    return arena[first : first + spill_layout(plan, part).memory_bytes]


def _first_slot(part: ShardLayout, plan: Plan) -> int:
    """Return the byte at which slots begin in a shard's arena."""
    return aligned(part.num_bytes(plan.precision.state_kinds))


def state_views(arena: torch.Tensor, part: ShardLayout, precision: Precision) -> dict[str, torch.Tensor]:
    """Return a view of each kind of a shard's state. They follow one another in its arena.

    arena: 1-D uint8.
    """
    views, start = {}, 0
    for kind, dtype in precision.state_kinds:
        stop = start + part.size_of(kind) * dtype.itemsize
        views[kind] = arena[start:stop].view(dtype)
        start = stop
    return views
