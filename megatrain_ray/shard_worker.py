"""The process of one optimizer shard: attaches its arenas, serves updates, writes its part of a save."""

from __future__ import annotations

import asyncio
import math
import os
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatrain_ray.arenas import SLAB, WORDS, WORKING, journal_arena, state_arena, state_views
from megatrain_ray.config import SaveCompression
from megatrain_ray.engine.adamw import Hyper
from megatrain_ray.engine.deadlines import DEADLINE_S
from megatrain_ray.engine.host_words import HostWords
from megatrain_ray.engine.save_cost import measure_copy
from megatrain_ray.engine.save_gate import SaveAttempt, SaveGate
from megatrain_ray.engine.shard import AdamShard
from megatrain_ray.engine.shard_layout import ShardLayout
from megatrain_ray.engine.shard_loop import ShardLoop
from megatrain_ray.engine.spare_memory import SpareMemory
from megatrain_ray.errors import DeadlineError
from megatrain_ray.io.arena import ArenaHandle
from megatrain_ray.io.arena_holder import ArenaHolder, Handles
from megatrain_ray.io.manifest import Manifest, PartManifest
from megatrain_ray.io.save import Piece, read_pieces, write_part
from megatrain_ray.planning import Prepared, muon_of


def wait_gone(pid: int, timeout_s: float) -> None:
    """Returns when there is no such process (a zombie is none). Raises DeadlineError after `timeout_s`."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(fd, "rb") as process:
        poll = select.poll()
        poll.register(process, select.POLLIN)  # readable once the process has ended
        if not poll.poll(1000 * timeout_s):
            raise DeadlineError(f"process {pid}, which is to be replaced, did not end within {timeout_s:.0f} s")


@dataclass(frozen=True)
class WrittenPart:
    """A shard's part of a save. `stall_s`: how long it held updates up; `write_s`: how long it took."""

    part: PartManifest
    stall_s: float
    write_s: float


class ShardWorker:
    """Plain class behind the shard actor; its methods may be called from several threads, updates come from `run`."""

    def __init__(
        self, prepared: Prepared, index: int, holders: Sequence[Handles], after_pid: int | None = None
    ) -> None:
        """`holders`: of the run's arenas, one of them alive; the state in them is kept. `after_pid`: the process that
        this one follows, which must be gone before anything here writes."""
        if after_pid is not None:
            wait_gone(after_pid, DEADLINE_S)
        plan = prepared.plan
        torch.set_num_threads(1)  # the shard has threads of its own, one block each
        self._prepared = prepared
        self._index = index
        self._layout = ShardLayout(
            prepared.structure.layout(plan.num_fragments), index, plan.num_shards, plan.shard_cut_elements
        )
        self._holder = ArenaHolder.adopt(holders)
        names = (WORKING, SLAB, WORDS, state_arena(index), journal_arena(index))
        self._arenas = {name: self._holder.map(name) for name in names}
        self._arenas[state_arena(index)].populate(plan.num_shard_threads)
        self._words = HostWords(self._arenas[WORDS].buffer, len(self._layout.model.layers), plan.num_shards)
        self._shard = self._make_shard()
        # A save with no step after it needs no copies.
        budget = plan.save_copy_bytes // plan.num_shards
        self._spare = SpareMemory([self._shard.copy_bytes(layer) for layer in plan.layer_order], budget)
        # No other than a save holds updates up, and no longer than the disk needs.
        self._copy_bytes_per_s = math.inf
        self._gate = SaveGate(self._shard, self._words, plan.layer_order, self._spare, plan.update_deadline_s)

    def _make_shard(self) -> AdamShard:
        plan, train = self._prepared.plan, self._prepared.config.train
        working = torch.frombuffer(self._arenas[WORKING].buffer, dtype=torch.uint8)
        num_bytes = self._layout.model.size * plan.precision.working_dtype.itemsize
        arena = torch.frombuffer(self._arenas[state_arena(self._index)].buffer, dtype=torch.uint8)
        state = state_views(arena, self._layout, plan.precision)
        return AdamShard(
            self._layout,
            plan.precision,
            working=working[:num_bytes].view(plan.precision.working_dtype),
            residual=state.get("residual"),
            m=state["m"],
            v=state["v"],
            hyper=Hyper(train.betas[0], train.betas[1], train.eps, train.weight_decay, muon_of(train)),
            num_threads=plan.num_shard_threads,
            journal=self._arenas[journal_arena(self._index)].buffer,
            saves_frozen=plan.saves_frozen,
        )

    def handles(self) -> dict[str, ArenaHandle]:
        """Of all arenas of the run: this process keeps them alive too."""
        return self._holder.handles

    def kernel_name(self) -> str:
        """What updates run as."""
        return self._shard.kernel_name

    def copy_bytes_per_s(self) -> float:
        """How fast layers are copied aside for a save; known once weights are loaded."""
        return self._copy_bytes_per_s

    def initialize(self) -> None:
        """Fills this shard's part from the model folder, or with random values."""
        self._shard.load(self._prepared.source.weights())
        self._take_spare_memory()

    def restore(self, save_folder: Path, manifest: Manifest) -> None:
        """Fills this shard's part from a save, whatever the number of shards that wrote it, and with what the save
        leaves out from where the run began."""
        asyncio.run(read_pieces(save_folder, manifest, self._pieces()))
        if not self._prepared.plan.saves_frozen:
            self._shard.load_frozen(self._prepared.source.base_weights())
        self._take_spare_memory()

    def run(self, abandoned: SaveAttempt) -> None:
        """Serves updates after those that the words say are done, until `stop`, and gives everything up then. Raises
        what went wrong in one.

        `abandoned`: no update waits for this or an earlier save.
        """
        self._gate.abandon(abandoned)
        loop = ShardLoop(
            self._shard,
            self._words,
            torch.frombuffer(self._arenas[SLAB].buffer, dtype=torch.uint8),
            self._prepared.plan.wire_dtype,
            self._prepared.plan.layer_order,
            self._gate,
        )
        loop.start()
        try:
            loop.join(timeout_s=None)
        finally:
            self._shard.close()
            self._holder.close()
            self._spare.close()

    def stop(self) -> None:
        self._words.stop()

    def _take_spare_memory(self) -> None:
        """While the engine starts: the copies of the first save would else wait for pages. In a daemon, since a process
        that is to end must not wait for it."""
        self._copy_bytes_per_s = measure_copy(self._shard, self._spare)
        threading.Thread(target=self._spare.populate, name="spare memory", daemon=True).start()

    def write_part(self, save_folder: Path, attempt: SaveAttempt, compression: SaveCompression) -> WrittenPart:
        """Writes this shard's part of the save of a step, each layer when it has had that step's update."""
        start_s = time.monotonic()
        save = self._gate.begin(attempt)
        pieces, done = self._gate.pieces(save), partial(self._gate.done, save)
        try:
            part = asyncio.run(write_part(save_folder, self._index, pieces, done=done, compression=compression))
        except BaseException:
            self._gate.leave(save)
            raise
        return WrittenPart(part, save.stall_s, time.monotonic() - start_s)

    def abandon_save(self, attempt: SaveAttempt) -> None:
        """Updates do not wait for this save any more."""
        self._gate.abandon(attempt)

    def _pieces(self) -> list[Piece]:
        return [piece for layer in range(len(self._layout.model.layers)) for piece in self._shard.pieces(layer)]
