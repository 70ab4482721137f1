"""The process of one optimizer shard: attaches its arenas, serves updates, writes its part of a save."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import torch

from megatrain_ray.arena_owner import SLAB, WORDS, WORKING, state_arena
from megatrain_ray.engine.adamw import Hyper
from megatrain_ray.engine.host_words import HostWords
from megatrain_ray.engine.layout import ShardLayout
from megatrain_ray.engine.shard import AdamShard
from megatrain_ray.engine.shard_loop import ShardLoop
from megatrain_ray.io.arena import Arena, ArenaHandle
from megatrain_ray.io.manifest import Manifest, PartManifest
from megatrain_ray.io.save import Piece, read_pieces, write_part
from megatrain_ray.planning import Prepared


class ShardWorker:
    """Plain class behind the shard actor; its methods may be called from several threads, updates come from `run`."""

    def __init__(self, prepared: Prepared, index: int, handles: Mapping[str, ArenaHandle]) -> None:
        plan = prepared.plan
        torch.set_num_threads(1)  # the shard has threads of its own, one block each
        self._prepared = prepared
        self._index = index
        self._layout = ShardLayout(
            prepared.structure.layout(plan.num_fragments), index, plan.num_shards, plan.shard_cut_elements
        )
        self._arenas = {name: Arena.attach(handles[name]) for name in (WORKING, SLAB, WORDS, state_arena(index))}
        self._arenas[state_arena(index)].populate(plan.num_shard_threads)
        num_layers = len(self._layout.model.layers)
        self._words = HostWords(self._arenas[WORDS].buffer, num_layers, plan.num_shards)
        working = torch.frombuffer(self._arenas[WORKING].buffer, dtype=torch.uint8)
        num_bytes = self._layout.model.size * plan.precision.working_dtype.itemsize
        train = prepared.config.train
        state = self._state()
        self._shard = AdamShard(
            self._layout,
            plan.precision,
            working=working[:num_bytes].view(plan.precision.working_dtype),
            residual=state.get("residual"),
            m=state["m"],
            v=state["v"],
            hyper=Hyper(train.betas[0], train.betas[1], train.eps, train.weight_decay),
            num_threads=plan.num_shard_threads,
        )

    def _state(self) -> dict[str, torch.Tensor]:
        """The shard's state kinds, one after the other in its own arena."""
        state = torch.frombuffer(self._arenas[state_arena(self._index)].buffer, dtype=torch.uint8)
        tensors, start = {}, 0
        for kind, dtype in self._prepared.plan.precision.state_kinds:
            stop = start + self._layout.size * dtype.itemsize
            tensors[kind] = state[start:stop].view(dtype)
            start = stop
        return tensors

    def initialize(self) -> None:
        """Fills this shard's part from the model folder, or with random values."""
        self._shard.load(self._prepared.source.weights())

    def restore(self, save_folder: Path, manifest: Manifest) -> None:
        """Fills this shard's part from a save, whatever the number of shards that wrote it."""
        asyncio.run(read_pieces(save_folder, manifest, self._pieces()))

    def run(self, generation: int) -> None:
        """Serves updates after `generation` until `stop`; raises what went wrong in one."""
        loop = ShardLoop(
            self._shard,
            self._words,
            torch.frombuffer(self._arenas[SLAB].buffer, dtype=torch.uint8),
            self._prepared.plan.wire_dtype,
            self._prepared.plan.layer_order,
            generation,
        )
        loop.start()
        loop.join(timeout_s=None)

    def stop(self) -> None:
        self._words.stop()

    def write_part(self, save_folder: Path) -> PartManifest:
        """Writes this shard's part of a save. No update may be under way."""
        return asyncio.run(write_part(save_folder, self._index, self._pieces()))

    def _pieces(self) -> list[Piece]:
        return [piece for layer in range(len(self._layout.model.layers)) for piece in self._shard.pieces(layer)]
