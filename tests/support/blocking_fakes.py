"""Drives a shard, its gate and a save by hand, for tests of SaveGate: two threads, ordered by events, not by time."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.layout.flat_layout import COMMON, FROZEN, FlatLayout, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.shards.save_gate import GatedSave, SaveAttempt, SaveGate
from megatrain_ray.engine.shards.snapshot_buffers import PAGE_BYTES, SnapshotBuffers
from megatrain_ray.io.saves.save_writer import Piece
from megatrain_ray.spans import SpanLog

NUM_LAYERS = 3
PIECE_BYTES = 8
LAYER_BYTES = 2 * PIECE_BYTES
KINDS = ("m", "v")
WAIT_S = 30.0


def attempt(step: int, number: int | None = None) -> SaveAttempt:
    return SaveAttempt(step, step if number is None else number)


def layout(fixed: Collection[int] = ()) -> ShardLayout:
    groups = [FROZEN if i in fixed else COMMON for i in range(NUM_LAYERS)]
    layers = [FlatLayout.build(f"layers.{i}", [ParameterSpec("w", "w", (2,), group=g)]) for i, g in enumerate(groups)]
    return ShardLayout(ModelLayout(tuple(layers), ()), 0, 1)


@dataclass
class FakeShard:
    """Stands in for a shard: its state is a number for each layer and kind, which is the generation it has."""

    layout: ShardLayout = field(default_factory=layout)
    state: dict[tuple[int, str], bytearray] = field(
        default_factory=lambda: {(i, kind): bytearray(PIECE_BYTES) for i in range(NUM_LAYERS) for kind in KINDS}
    )
    copied: list[int] = field(default_factory=list)
    absent: set[int] = field(default_factory=set)  # layers of which it owns nothing
    spans: SpanLog = field(default_factory=SpanLog)

    def pieces(self, layer: int) -> Iterator[Piece]:
        for kind in () if layer in self.absent else KINDS:
            yield Piece(f"layers.{layer}", kind, 0, 2, [memoryview(self.state[layer, kind])])

    def copy_bytes(self, layer: int) -> int:
        return 0 if layer in self.absent or layer in self.layout.model.fixed else LAYER_BYTES

    def copy_layer(self, layer: int, memory: Tensor) -> list[Piece]:
        self.copied.append(layer)
        pieces = list(self.pieces(layer))
        buffers = [memory.numpy().data[i * PIECE_BYTES : (i + 1) * PIECE_BYTES] for i in range(len(pieces))]
        for piece, buffer in zip(pieces, buffers, strict=True):
            buffer[:] = piece.buffers[0]
        return [piece._replace(buffers=[buffer]) for piece, buffer in zip(pieces, buffers, strict=True)]

    def fetch(self, part: Piece) -> Piece:
        return part

    def write(self, layer: int, generation: int) -> None:
        for kind in KINDS:
            self.state[layer, kind][:] = bytes([generation]) * PIECE_BYTES


@dataclass
class Run:
    """Drives one shard that makes updates by hand, and the gate between it and a save."""

    gate: SaveGate
    shard: FakeShard
    words: SharedUpdateState
    pool: ThreadPoolExecutor

    def update(self, layer: int, update: int) -> None:
        self.gate.before_update(layer, update)
        self.words.generations.begin(0, layer, update)
        self.shard.write(layer, update)
        self.words.generations.finish(0, layer, update)

    def update_all(self, update: int, *, save: bool) -> None:
        self.commit(update, save=save)
        for layer in range(NUM_LAYERS):
            self.update(layer, update)

    def commit(self, update: int, *, save: bool) -> None:
        self.words.updates.commit(UpdateParams(update, update, 0.1, 1.0, skip=False, save=save))
        for layer in range(NUM_LAYERS):
            self.words.gradients.land(layer, update, 0)

    def in_thread(self, function: Callable[[], object]) -> Future[object]:
        return self.pool.submit(function)


@contextmanager
def running(num_copies: int = 0, timeout_s: float = WAIT_S, fixed: Collection[int] = ()) -> Iterator[Run]:
    words = SharedUpdateState(memoryview(mmap.mmap(-1, 8 * SharedUpdateState.num_words(NUM_LAYERS, 1))), NUM_LAYERS, 1)
    words.reset(0, [set(range(NUM_LAYERS)) - set(fixed)])
    shard = FakeShard(layout(fixed))
    spare = SnapshotBuffers([LAYER_BYTES] * NUM_LAYERS, num_copies * PAGE_BYTES)
    order = [i for i in range(NUM_LAYERS) if i not in fixed]
    gate = SaveGate(shard, words, 0, order, spare, timeout_s)  # type: ignore[arg-type]
    with ThreadPoolExecutor(4) as pool:
        try:
            yield Run(gate, shard, words, pool)
        finally:
            words.stop()
            gate.abandon(attempt(1 << 40))
            spare.close()


def read(run: Run, save: GatedSave, pieces: Iterator[Piece], num: int) -> list[int]:
    """Read the next `num` pieces, which releases them, and return their generations."""
    found = []
    for _ in range(num):
        piece = next(pieces)
        (value,) = set(piece.buffers[0])
        found.append(value)
        run.gate.part_read(save, piece)
    return found
