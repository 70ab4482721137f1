"""Runs the process of one optimizer shard: it attaches its arenas, serves updates, and writes its part of a save."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.measure.save_cost import measure_copy
from megatrain_ray.engine.plan.plan_shards import shard_layout, spill_layout
from megatrain_ray.engine.shards.adam_shard import AdamShard
from megatrain_ray.engine.shards.save_gate import SaveAttempt, SaveGate, WrittenPart
from megatrain_ray.engine.shards.shard_loop import ShardLoop
from megatrain_ray.engine.shards.snapshot_buffers import SnapshotBuffers
from megatrain_ray.engine.shards.spilling_shard import SpillingShard
from megatrain_ray.engine.spill.spill_ring import SpillRing
from megatrain_ray.engine.spill.spill_table import SpillTable
from megatrain_ray.engine.weights.saved_values import as_saved, restore_pieces
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.arenas.arena_holder import ArenaHandle, ArenaHolder, Handles
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.storage.blob_store import BlobStore
from megatrain_ray.io.storage.disk_io import HeldFiles, taken_bytes
from megatrain_ray.io.storage.measured_store import DiskMeter, MeasuredStore
from megatrain_ray.model.engine_settings import adamw_constants
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.run.run_processes import wait_gone
from megatrain_ray.spans import RecordedSpans, traced_steps, traced_updates
from megatrain_ray.workers import arenas
from megatrain_ray.workers.arenas import COUNTERS, SHARED, SLAB, WORDS, WORKING
from megatrain_ray.workers.numa_binding import bind_shard


class ShardWorker:
    """Runs one optimizer shard. A plain class without Ray, which the shard actor wraps.

    Its methods may be called from several threads. Updates run in `run`.
    """

    def __init__(
        self, run_spec: RunSpec, index: int, holders: Sequence[Handles], after_pid: int | None = None,
        pinned: bool = False,
    ) -> None:  # fmt: skip
        """Attach the shard's arenas. The state in them is kept.

        index: among the shards of all hosts.
        holders: processes that hold the arenas of the host; at least one of them is alive.
        after_pid: process id of the predecessor, which must have ended before anything is written here.
        pinned: the shard has the process to itself, and keeps it on the CPUs of its home if the plan gives it one.
        """
        if after_pid is not None:
            wait_gone(after_pid, DEADLINE_S)
        plan = run_spec.plan
        torch.set_num_threads(1)  # the shard has threads of its own, one block each
        self._run_spec = run_spec
        self._part = index
        host, index = divmod(index, plan.shards.num_shards)
        self._index = index  # among the shards of its host
        layout = run_spec.structure.layout(plan.num_fragments).on_host(host, plan.hosts.num_hosts)
        self._layout = shard_layout(plan, layout, index)
        self._holder = ArenaHolder.adopt(holders)
        names = (*SHARED, arenas.state_arena(index), arenas.journal_arena(index))
        self._arenas = {name: self._holder.map(name) for name in names}
        # Must precede the start of any thread, and the first touch of any page. All shards get this far before one of
        # them fills its part.
        self._home_problems = bind_shard(plan, self._layout, self._arenas, pinned=pinned)
        self._words = arenas.words_in(self._arenas[WORDS].buffer, plan, host)
        self._counters = arenas.counters_in(self._arenas[COUNTERS].buffer, plan).shards[index]
        self._disk = DiskMeter(self._counters["disk"])
        self._update_s_before = float(self._counters["update_s"])  # of its predecessors
        self._shard = self._make_shard()
        # The GPU worker has the rest, for the layers on its device.
        budget = (plan.saves.copy_bytes - plan.saves.device_copy_bytes) // plan.shards.num_shards
        self._spare = SnapshotBuffers([self._shard.copy_bytes(layer) for layer in plan.layer_order], budget)
        self._copy_bytes_per_s = math.inf
        # Only a save delays updates, and no longer than the disk needs: hence the timeout of an update.
        self._gate = SaveGate(self._shard, self._words, index, plan.layer_order, self._spare, plan.update_deadline_s)

    def _make_shard(self) -> AdamShard:
        plan = self._run_spec.plan
        arena = arenas.tensor_of(self._arenas[arenas.state_arena(self._index)])
        make = partial(SpillingShard, self._make_ring(arena)) if plan.uses_disk else AdamShard
        return make(
            self._layout,
            plan.precision,
            working=arenas.working_copies(self._arenas[WORKING], self._layout.working_size, plan.precision),
            own=arenas.state_views(arena, self._layout, plan.precision),
            hyper=adamw_constants(self._run_spec.config.train),
            num_threads=plan.shards.num_threads,
            journal=self._arenas[arenas.journal_arena(self._index)].buffer,
            saves_frozen=plan.saves.includes_frozen,
        )

    def _make_ring(self, arena: torch.Tensor) -> SpillRing:
        """Return the ring through which spilled state moves, in the arena of this shard's state."""
        plan, part = self._run_spec.plan, self._layout
        layout = spill_layout(plan, part)
        store: BlobStore = HeldFiles()  # nothing is read from it if nothing is spilled
        name = ""
        if layout.blob_bytes:
            store, name = self._holder.spill(arenas.spill_file(self._index), plan.disk.io)
        memory = arenas.spill_memory(arena, plan, part)
        if plan.disk.packed:
            store = SpillTable(layout, memory).packing(store)
        measured = MeasuredStore(store, self._disk)
        return SpillRing(layout, memory, measured, name, plan.update_deadline_s, written=self._words.ring)

    def handles(self) -> dict[str, ArenaHandle]:
        return self._holder.handles

    def kernel_name(self) -> str:
        return self._shard.kernel_name

    def home_problems(self) -> tuple[str, ...]:
        return self._home_problems

    def copy_bytes_per_s(self) -> float:
        """Return the rate at which layers are copied aside for a save. Known once weights are loaded."""
        return self._copy_bytes_per_s

    def initialize(self) -> None:
        """Fill this shard's part from the model folder, or with random values."""
        self._allocate_state()
        self._shard.load(self._run_spec.source.weights(), self._run_spec.plan.shards.num_threads)
        self._prepare_snapshots()

    def restore(self, save_folder: Path, manifest: Manifest) -> None:
        """Fill this shard's part from a save, whatever the number of shards that wrote it.

        What the save leaves out is loaded from where the run began.
        """
        self._allocate_state()
        for pieces in self._shard.restorable():
            restore_pieces(save_folder, manifest, as_saved(pieces, manifest, self._layout.model))
        plan = self._run_spec.plan
        if not plan.saves.includes_frozen:
            self._shard.load_frozen(self._run_spec.source.base_weights(), plan.shards.num_threads)
        self._prepare_snapshots()

    def run(self, abandoned: SaveAttempt) -> None:
        """Serve updates until `stop`, then release everything. Raises what went wrong in an update.

        Starts after the last update that is done by the signal words. No update waits for saves up to `abandoned`.
        """
        self._gate.abandon(abandoned)
        plan, slab = self._run_spec.plan, arenas.tensor_of(self._arenas[SLAB])
        traced = traced_updates(traced_steps(self._run_spec.config.log.trace))
        loop = ShardLoop(
            self._shard, self._words, slab, plan.gradients.offload_dtype, plan.layer_order, self._gate, traced,
            self._count_update, plan.gradients_on_disk,
        )  # fmt: skip
        loop.start()
        try:
            loop.join(timeout_s=None)
        finally:
            self.close()

    def update_time(self) -> tuple[int, float]:
        """Return how many updates the shard has made in this run, and for how many seconds its kernel has worked."""
        return int(self._counters["updates"]), float(self._counters["update_s"])

    def _count_update(self, update: int) -> None:
        if handle := self._holder.handles.get(arenas.spill_file(self._index)):
            self._counters["spill_bytes"] = taken_bytes(handle.fd)
        self._counters["update_s"] = self._update_s_before + self._shard.update_s
        self._counters["updates"] += 1

    def spans(self, last: int) -> RecordedSpans:
        """Return the spans of the traced updates, once update `last` is done or the shards have stopped."""
        timeout_s = self._run_spec.plan.update_deadline_s
        with suppress(MegatrainError):
            for layer in self._run_spec.plan.layer_order:
                self._words.generations.wait(self._index, layer, last, timeout_s)
        return self._shard.spans.take()

    def stop(self) -> None:
        self._words.stop()

    def close(self) -> None:
        """Release everything, when no update is served any more. Idempotent."""
        self._shard.close()
        self._holder.close()
        self._spare.close()

    def _allocate_state(self) -> None:
        # Only when the state is about to be filled: until then the GPU worker builds its engine.
        self._arenas[arenas.state_arena(self._index)].populate(self._run_spec.plan.shards.num_threads)

    def _prepare_snapshots(self) -> None:
        """Measure the rate of copies, and allocate the pages of spare memory in a background thread.

        This happens while the engine starts; otherwise the copies of the first save would wait for pages. The thread is
        a daemon, since a process that is to end must not wait for it.
        """
        self._copy_bytes_per_s = measure_copy(self._shard, self._spare)
        threading.Thread(target=self._spare.populate, name="spare memory", daemon=True).start()

    def write_part(self, save_folder: Path, attempt: SaveAttempt, compression: SaveCompression) -> WrittenPart:
        """Write this shard's part of the save of a step, each layer when it has had that step's update."""
        return self._gate.write_part(self._part, save_folder, attempt, compression)

    def abandon_save(self, attempt: SaveAttempt) -> None:
        self._gate.abandon(attempt)
