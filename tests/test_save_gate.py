"""SaveGate: a save is one generation, whatever updates do meanwhile. Two threads, ordered by events, never by time."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from megatrain_ray.engine.host_words import HostWords
from megatrain_ray.engine.layout import FlatLayout, ModelLayout, ParameterSpec, ShardLayout
from megatrain_ray.engine.save_gate import SaveGate
from megatrain_ray.engine.shard import UpdateHeader
from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.pieces import Piece

NUM_LAYERS = 3
PIECE_BYTES = 8
LAYER_BYTES = 2 * PIECE_BYTES
KINDS = ("m", "v")
WAIT_S = 30.0


def layout() -> ShardLayout:
    layers = tuple(FlatLayout.build(f"layers.{i}", [ParameterSpec(f"w{i}", "w", (2,))]) for i in range(NUM_LAYERS))
    return ShardLayout(ModelLayout(layers, ()), 0, 1)


@dataclass
class FakeShard:
    """State that is a number per layer and kind: the generation it has."""

    layout: ShardLayout = field(default_factory=layout)
    state: dict[tuple[int, str], bytearray] = field(
        default_factory=lambda: {(i, kind): bytearray(PIECE_BYTES) for i in range(NUM_LAYERS) for kind in KINDS}
    )
    copied: list[int] = field(default_factory=list)

    def pieces(self, layer: int) -> Iterator[Piece]:
        for kind in KINDS:
            yield Piece(f"layers.{layer}", kind, 0, 2, [memoryview(self.state[layer, kind])])

    def copy_layer(self, layer: int) -> list[Piece]:
        self.copied.append(layer)
        return [piece._replace(buffers=[memoryview(bytearray(piece.buffers[0]))]) for piece in self.pieces(layer)]

    def write(self, layer: int, generation: int) -> None:
        for kind in KINDS:
            self.state[layer, kind][:] = bytes([generation]) * PIECE_BYTES


@dataclass
class Run:
    """One shard that makes updates by hand, and the gate between it and a save."""

    gate: SaveGate
    shard: FakeShard
    words: HostWords
    pool: ThreadPoolExecutor

    def update(self, layer: int, update: int) -> None:
        self.gate.enter(layer, update)
        self.words.begin(0, layer, update)
        self.shard.write(layer, update)
        self.words.finish(0, layer, update)

    def update_all(self, update: int, *, save: bool) -> None:
        self.commit(update, save=save)
        for layer in range(NUM_LAYERS):
            self.update(layer, update)

    def commit(self, update: int, *, save: bool) -> None:
        self.words.commit(UpdateHeader(update, update, 0.1, 1.0, skip=False, save=save))
        for layer in range(NUM_LAYERS):
            self.words.land(layer, update, 0)

    def in_thread(self, function: Callable[[], object]) -> Future[object]:
        return self.pool.submit(function)


@contextmanager
def running(copy_bytes: int = 0, timeout_s: float = WAIT_S) -> Iterator[Run]:
    words = HostWords(memoryview(mmap.mmap(-1, 8 * HostWords.num_words(NUM_LAYERS, 1))), NUM_LAYERS, 1)
    words.reset(0)
    shard = FakeShard()
    gate = SaveGate(shard, words, range(NUM_LAYERS), copy_bytes, timeout_s)  # type: ignore[arg-type]
    with ThreadPoolExecutor(4) as pool:
        try:
            yield Run(gate, shard, words, pool)
        finally:
            words.stop()
            gate.abandon(1 << 40)


def read(run: Run, pieces: Iterator[Piece], num: int) -> list[int]:
    """The generations of the next `num` pieces, which are then done with."""
    found = []
    for _ in range(num):
        piece = next(pieces)
        (value,) = set(piece.buffers[0])
        found.append(value)
        run.gate.done(piece)
    return found


def test_updates_that_no_save_wants_are_not_held_up() -> None:
    with running() as run:
        for update in range(1, 6):
            run.update_all(update, save=False)
        assert run.words.generation(0) == 5


def test_a_layer_is_overwritten_only_after_it_was_written() -> None:
    with running() as run:
        run.update_all(1, save=True)
        run.commit(2, save=False)
        overwriting = run.in_thread(lambda: run.update(0, 2))
        run.gate.begin(1)
        pieces = run.gate.pieces()
        assert read(run, pieces, 1) == [1]
        assert not overwriting.done(), "half a layer was written"
        assert read(run, pieces, 1) == [1]
        overwriting.result(WAIT_S)
        others = [run.in_thread(lambda layer=layer: run.update(layer, 2)) for layer in (1, 2)]
        assert read(run, pieces, 4) == [1] * 4
        for other in others:
            other.result(WAIT_S)
        assert next(pieces, None) is None
        assert run.gate.stall_s > 0


def test_with_spare_ram_nothing_waits() -> None:
    with running(copy_bytes=NUM_LAYERS * LAYER_BYTES) as run:
        run.update_all(1, save=True)
        run.gate.begin(1)
        run.update_all(2, save=False)
        run.update_all(3, save=False)
        pieces = run.gate.pieces()
        assert read(run, pieces, 6) == [1] * 6
        assert run.shard.copied == [0, 1, 2]


def test_copies_stay_within_their_budget() -> None:
    with running(copy_bytes=LAYER_BYTES) as run:
        run.update_all(1, save=True)
        run.gate.begin(1)
        run.commit(2, save=False)
        run.update(0, 2)
        waiting = run.in_thread(lambda: run.update(1, 2))
        pieces = run.gate.pieces()
        assert read(run, pieces, 2) == [1, 1]
        assert not waiting.done() or run.shard.copied == [0, 1], "the copy of layer 0 is gone: there is room again"
        assert read(run, pieces, 2) == [1, 1]
        waiting.result(WAIT_S)
        assert read(run, pieces, 2) == [1, 1]
        assert run.shard.copied in ([0], [0, 1])


def test_the_writer_waits_for_updates_that_have_not_been_made() -> None:
    with running() as run:
        run.gate.begin(1)
        pieces = run.gate.pieces()
        first = run.in_thread(lambda: read(run, pieces, 2))
        assert not first.done()
        run.update_all(1, save=True)
        assert first.result(WAIT_S) == [1, 1]


def test_the_update_waits_for_a_save_that_has_not_begun() -> None:
    with running(copy_bytes=NUM_LAYERS * LAYER_BYTES) as run:
        run.update_all(1, save=True)
        run.commit(2, save=False)
        ahead = run.in_thread(lambda: run.update(0, 2))
        assert run.words.generation(0) == 1
        run.gate.begin(1)
        ahead.result(WAIT_S)
        assert read(run, run.gate.pieces(), 2) == [1, 1]


@pytest.mark.parametrize("begun", [False, True])
def test_nobody_waits_for_an_abandoned_save(begun: bool) -> None:
    with running() as run:
        run.update_all(1, save=True)
        run.commit(2, save=False)
        waiting = run.in_thread(lambda: run.update(0, 2))
        if begun:
            run.gate.begin(1)
            pieces = run.gate.pieces()
        run.gate.abandon(1)
        waiting.result(WAIT_S)
        if begun:
            with pytest.raises(MegatrainError, match="the save of step 1 was abandoned"):
                next(pieces)


def test_the_next_save_is_another_one() -> None:
    with running(copy_bytes=NUM_LAYERS * LAYER_BYTES) as run:
        for update in (1, 2, 3):
            run.update_all(update, save=True)
            run.gate.begin(update)
            assert read(run, run.gate.pieces(), 6) == [update] * 6
        assert run.shard.copied == []


def test_a_save_that_does_not_get_on_is_named() -> None:
    with running(timeout_s=0.0) as run:
        run.update_all(1, save=True)
        run.commit(2, save=False)
        with pytest.raises(DeadlineError, match="optimizer shard 0 waited 0 s for the save of step 1 to begin"):
            run.update(0, 2)
        run.gate.begin(1)
        with pytest.raises(DeadlineError, match="for layer 0 of the save of step 1 to be written"):
            run.update(0, 2)


def test_stopping_ends_the_wait() -> None:
    with running() as run:
        run.update_all(1, save=True)
        run.commit(2, save=False)
        waiting = run.in_thread(lambda: run.update(0, 2))
        run.words.stop()
        with pytest.raises(MegatrainError, match="stopped"):
            waiting.result(WAIT_S)
