"""Names the arenas and spill files of a run, computes their sizes, and opens what lies in them."""

from __future__ import annotations

from pathlib import Path

import torch

from megatrain_ray.accounting.work_counters import WorkCounters
from megatrain_ray.engine.host.gradient_slab import held_slab_bytes
from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.undo_log import Journal
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_shards import shard_layout, spill_layout
from megatrain_ray.engine.spill.disk_weights import DiskWeights, ShardFile
from megatrain_ray.engine.spill.spill_table import SpillTable
from megatrain_ray.io.arenas.arena_holder import Arena, ArenaHolder
from megatrain_ray.io.storage.blob_store import BlobStore, aligned
from megatrain_ray.io.storage.disk_io import SpillFile
from megatrain_ray.io.storage.measured_store import DiskMeter, MeasuredStore
from megatrain_ray.io.words.atomic_words import WORD_BYTES
from megatrain_ray.spans import SpanLog

WORKING = "working"
SLAB = "slab"
WORDS = "words"
COUNTERS = "counters"
SHARED = (WORKING, SLAB, WORDS, COUNTERS)  # mapped by the GPU workers and all shards of a host


def state_arena(shard: int) -> str:
    return f"state-{shard}"


def journal_arena(shard: int) -> str:
    return f"journal-{shard}"


def spill_file(shard: int) -> str:
    return f"spill-{shard}"


def activations_file(host_rank: int) -> str:
    return f"spill-activations-{host_rank}"


def arena_sizes(plan: Plan, layout: ModelLayout) -> dict[str, int]:
    """Return the bytes of every arena of a host, by name. `layout`: of that host.

    Four arenas are mapped by all processes of the host. Each shard has two more, which only it maps, except that the
    GPU worker reads the shard's momenta if Muon trains something.
    """
    slab_bytes = held_slab_bytes(plan, layout) + plan.gradients.direction_slab_bytes
    sizes = {
        WORKING: max(1, layout.size_among(plan.weights_on_host)) * plan.precision.working_dtype.itemsize,
        SLAB: max(1, slab_bytes),  # 0 bytes are needed if everything lives on the device
        WORDS: words_bytes(plan),
        COUNTERS: WorkCounters.num_bytes(plan.shards.num_shards, plan.hosts.gpus_per_host),
    }
    for k in range(plan.shards.num_shards):
        part = shard_layout(plan, layout, k)
        # 0 bytes are needed if little is trained.
        sizes[state_arena(k)] = max(1, _first_slot(part, plan) + spill_layout(plan, part).memory_bytes)
        sizes[journal_arena(k)] = Journal.num_bytes(part, plan.precision, plan.shards.num_threads)
    return sizes


def words_bytes(plan: Plan) -> int:
    return WORD_BYTES * SharedUpdateState.num_words(
        len(plan.layers), len(plan.updated_layers), plan.hosts.gpus_per_host
    )


def words_in(buffer: memoryview, plan: Plan, host: int = 0) -> SharedUpdateState:
    """Return the signal words of a host, in shared memory of at least `words_bytes` bytes."""
    return SharedUpdateState(
        buffer, len(plan.layers), len(plan.updated_layers), plan.hosts.gpus_per_host, host * plan.shards.num_shards
    )


def counters_in(buffer: memoryview, plan: Plan) -> WorkCounters:
    return WorkCounters(buffer, plan.shards.num_shards, plan.hosts.gpus_per_host)


def tensor_of(arena: Arena) -> torch.Tensor:
    """Return the memory of an arena as a 1-D tensor of uint8."""
    return torch.frombuffer(arena.buffer, dtype=torch.uint8)


def working_copies(arena: Arena, size: int, precision: Precision) -> torch.Tensor:
    """Return the first `size` elements of WORKING, 1-D."""
    return tensor_of(arena)[: size * precision.working_dtype.itemsize].view(precision.working_dtype)


def spill_files(plan: Plan, layout: ModelLayout, folder: str | None) -> dict[str, SpillFile]:
    """Return a spill file for each shard that has something on disk, and one for each GPU's activations, by name.

    folder: spill.path. It is made absolute here, since other processes have other working directories.
    """
    shards = range(plan.shards.num_shards)
    num_bytes = {spill_file(k): spill_layout(plan, shard_layout(plan, layout, k)).blob_bytes for k in shards}
    num_bytes |= {activations_file(k): plan.activation_file_bytes for k in range(plan.hosts.gpus_per_host)}
    return {name: SpillFile(Path(folder or ".").absolute(), nbytes) for name, nbytes in num_bytes.items() if nbytes}


def spill_memory(arena: torch.Tensor, plan: Plan, part: ShardLayout) -> torch.Tensor:
    """Return the memory in a shard's arena (1-D uint8) through which spilled state passes, after the rest."""
    first = _first_slot(part, plan)
    return arena[first : first + spill_layout(plan, part).memory_bytes]


def _first_slot(part: ShardLayout, plan: Plan) -> int:
    """Return the byte at which slots begin in a shard's arena."""
    return aligned(part.num_bytes(plan.precision.state_kinds))


def state_views(arena: torch.Tensor, part: ShardLayout, precision: Precision) -> dict[str, torch.Tensor]:
    """Return a view of each kind of a shard's state. They follow one another in its arena, 1-D uint8."""
    views, start = {}, 0
    for kind, dtype in precision.state_kinds:
        stop = start + part.size_of(kind) * dtype.itemsize
        views[kind] = arena[start:stop].view(dtype)
        start = stop
    return views


def open_disk_weights(
    plan: Plan, layout: ModelLayout, holder: ArenaHolder, meter: DiskMeter, spans: SpanLog
) -> DiskWeights | None:
    """Open the working copies that are on disk; return None if there are none.

    holder: must stay open as long as the weights are read.
    """
    if not plan.weights_on_disk:
        return None
    files = []
    for k in range(plan.shards.num_shards):
        part = shard_layout(plan, layout, k)
        on_disk = spill_layout(plan, part)
        if on_disk.layers:
            table = SpillTable(on_disk, spill_memory(tensor_of(holder.map(state_arena(k))), plan, part))
            store, name = holder.spill(spill_file(k), plan.disk.io)
            store = table.packing(store) if plan.disk.packed else store
            files.append(ShardFile(on_disk, table, MeasuredStore(store, meter), name))
    return DiskWeights(plan, layout, files, spans=spans)


def open_activations(plan: Plan, holder: ArenaHolder, meter: DiskMeter, host_rank: int) -> tuple[BlobStore, str] | None:
    """Return store and name of the file in which a GPU worker keeps activations, or None if none go to disk."""
    if not plan.disk_activations:
        return None
    store, name = holder.spill(activations_file(host_rank), plan.disk.io)
    return MeasuredStore(store, meter), name


def find_momenta(plan: Plan, layout: ModelLayout, holder: ArenaHolder) -> tuple[list[ShardLayout], list[torch.Tensor]]:
    """Return the shards' layouts and momenta, both empty unless Muon trains something."""
    parts, tensors = [], []
    for k in range(plan.shards.num_shards if plan.num_muon else 0):
        part = shard_layout(plan, layout, k)
        parts.append(part)
        tensors.append(state_views(tensor_of(holder.map(state_arena(k))), part, plan.precision)["m"])
    return parts, tensors
