"""ShardLoop: shards driven by words in shared memory, in threads and in processes of their own."""

from __future__ import annotations

import mmap
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain_ray.engine.host.shared_update_state import SharedUpdateState, TornLayer
from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.undo_log import Journal, serial_of
from megatrain_ray.engine.shards.adam_shard import AdamShard
from megatrain_ray.engine.shards.save_gate import SaveGate
from megatrain_ray.engine.shards.shard_loop import ShardLoop
from megatrain_ray.engine.shards.snapshot_buffers import SnapshotBuffers
from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.workers.arenas import state_views
from tests.support.shards import (
    Dictionary,
    ShardedState,
    Shards,
    assert_equal,
    flat_directions,
    flat_gradients,
    header,
    headers,
    model_layout,
    new_words,
    open_shards,
    poisoned,
    random_masters,
    reference,
    shard_over,
)

FORWARD, BACKWARD = (0, 1, 2), (2, 1, 0)
WAIT_S = 60.0
PRECISION = Precision.BF16


def wait_generation(words: SharedUpdateState, layer: int, generation: int, num_shards: int = 2) -> None:
    for shard in range(num_shards):
        words.generations.wait(shard, layer, generation, WAIT_S)


def gate_of(shard: AdamShard, words: SharedUpdateState, order: tuple[int, ...]) -> SaveGate:
    return SaveGate(shard, words, shard.layout.index, order, SnapshotBuffers([], 0), timeout_s=WAIT_S)


@dataclass(frozen=True)
class Worker:
    """Does what a GPU worker does to the host: gradients into the slab, landings, commits."""

    layout: ModelLayout
    words: SharedUpdateState
    slab: Tensor  # every layer's gradient (bf16) at its own place, and then its directions

    def land(self, update: int, layer: int, gradient: Tensor) -> None:
        """Put a gradient and its directions into the slab as soon as it is free again, and signal their landing."""
        wait_generation(self.words, layer, update - 1)
        start = 2 * self.layout.starts[layer]
        self.slab[start : start + gradient.nbytes].copy_(gradient.view(torch.uint8))
        directions = flat_directions(self.layout, update)[layer]
        behind = 2 * self.layout.size + start
        self.slab[behind : behind + directions.nbytes].copy_(directions.view(torch.uint8))
        self.words.gradients.land(layer, update, start, behind)

    def run(self, num_updates: int, *, commit_first: bool) -> None:
        """Gradients land in backward order; the commit comes before them (no clipping) or after (clipping)."""
        for update_header in headers(num_updates):
            update = update_header.update
            if commit_first:
                self.words.updates.commit(update_header)
            for layer in BACKWARD:
                self.land(update, layer, flat_gradients(self.layout, update, torch.bfloat16)[layer])
            if not commit_first:
                self.words.updates.commit(update_header)
        for layer in FORWARD:
            wait_generation(self.words, layer, num_updates)


@contextmanager
def serving(
    shards: Shards, words: SharedUpdateState, slab: Tensor, order: tuple[int, ...], traced: range = range(0)
) -> Iterator[list[ShardLoop]]:
    loops = [
        ShardLoop(shard, words, slab, torch.bfloat16, order, gate_of(shard, words, order), traced)
        for shard in shards.shards
    ]
    for loop in loops:
        loop.start()
    try:
        yield loops
    finally:
        words.stop()


def test_a_loop_goes_on_where_a_killed_one_stood() -> None:
    """Layer 0 is done, layer 1 is torn in its last unit, and layer 2 is untouched.

    The first stays, the second is rolled back and made again, the third is made.
    """
    layout, gradients, update_header = model_layout(), flat_gradients(model_layout(), 1, torch.bfloat16), headers(1)[0]
    part = ShardLayout(layout, 0, 1)
    working = poisoned(layout.size, PRECISION.working_dtype)
    own = {kind: poisoned(part.size_of(kind), dtype) for kind, dtype in PRECISION.state_kinds}
    memory = memoryview(mmap.mmap(-1, Journal.num_bytes(part, PRECISION, 1)))
    words, slab = new_words(), torch.zeros(4 * layout.size, dtype=torch.uint8)
    with closing(shard_over(part, PRECISION, working, own, 1, memory)) as killed:
        killed.load(Dictionary(random_masters(layout)))
        words.updates.commit(update_header)
        for layer in FORWARD:
            Worker(layout, words, slab).land(1, layer, gradients[layer])
        words.generations.begin(0, 0, 1)
        killed.update(0, gradients[0], update_header, serial_of(1, 0, 3))
        words.generations.finish(0, 0, 1)
        words.generations.begin(0, 1, 1)
        tear(killed, Journal(memory, part, PRECISION, 1), serial_of(1, 1, 3))
    with closing(shard_over(part, PRECISION, working, own, 1, memory)) as shard:
        loop = ShardLoop(shard, words, slab, torch.bfloat16, FORWARD, gate_of(shard, words, FORWARD))
        loop.start()
        for layer in FORWARD:
            wait_generation(words, layer, 1, num_shards=1)
        words.stop()
        loop.join(WAIT_S)
    assert_equal(ShardedState([part], working, [own]), reference(layout, 1, torch.bfloat16))


def tear(shard: AdamShard, journal: Journal, serial: int) -> None:
    """Leave the last unit of layer 1, which is Muon's, as a kill can leave it: saved, half overwritten."""
    last = shard.parts(1, shard.hyper)[-1]
    assert last.by_muon
    unit = ElementRange(last.units.stop - 1, last.units.stop)
    elements = last.elements(unit)
    state = last.state.cut(elements)
    journal.save(0, unit, state, serial)
    for tensor in (state.working, state.m):
        tensor[: elements.size // 2].fill_(7.0)


@pytest.mark.parametrize(("order", "commit_first"), [(FORWARD, False), (BACKWARD, True)])
def test_threads_serve_ten_updates_exactly(order: tuple[int, ...], commit_first: bool) -> None:
    with open_shards(PRECISION, 2) as shards:
        words, slab = new_words(), torch.zeros(4 * shards.layout.size, dtype=torch.uint8)
        shards.load(Dictionary(random_masters(shards.layout)))
        with serving(shards, words, slab, order) as loops:
            Worker(shards.layout, words, slab).run(10, commit_first=commit_first)
        for loop in loops:
            loop.join(WAIT_S)
        assert [words.generations.torn(shard) for shard in range(2)] == [None, None]
        assert_equal(shards, reference(shards.layout, 10, torch.bfloat16))


def test_updates_that_are_traced_leave_spans() -> None:
    with open_shards(PRECISION, 2) as shards:
        words, slab = new_words(), torch.zeros(4 * shards.layout.size, dtype=torch.uint8)
        shards.load(Dictionary(random_masters(shards.layout)))
        with serving(shards, words, slab, FORWARD, traced=range(2, 4)) as loops:
            Worker(shards.layout, words, slab).run(5, commit_first=False)
        for loop in loops:
            loop.join(WAIT_S)
        for shard in shards.shards:
            spans = shard.spans.take().spans
            one_update = [(name, layer) for layer in FORWARD for name in ("wait gradient", "update")]
            skipped = [("wait gradient", layer) for layer in FORWARD]
            assert [(span.name, span.layer) for span in spans] == [*one_update, *skipped]
            assert all(span.waits == (span.name == "wait gradient") for span in spans)


def serve_in_a_process(paths: dict[str, str], index: int, num_shards: int) -> None:
    """Run as the main of a shard process. It maps its own state only."""
    part = ShardLayout(model_layout(), index, num_shards)
    words = SharedUpdateState(memoryview(mapped(paths["words"]).numpy()), 3, num_shards)
    own = state_tensors(mapped(paths[f"state {index}"]), part)
    shard = shard_over(part, PRECISION, mapped(paths["working"]).view(PRECISION.working_dtype), own, num_threads=1)
    shard.load(Dictionary(random_masters(part.model)))
    loop = ShardLoop(shard, words, mapped(paths["slab"]), torch.bfloat16, FORWARD, gate_of(shard, words, FORWARD))
    loop.start()
    loop.join(timeout_s=None)
    shard.close()


def state_tensors(memory: Tensor, part: ShardLayout) -> dict[str, Tensor]:
    return state_views(memory, part, PRECISION)


def mapped(path: str) -> Tensor:
    with Path(path).open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


@contextmanager
def memfds(sizes: dict[str, int]) -> Iterator[dict[str, str]]:
    """Shared memory by name, as paths that other processes can open while this one lives."""
    fds = {name: os.memfd_create(name) for name in sizes}
    for name, fd in fds.items():
        os.truncate(fd, sizes[name])
    try:
        yield {name: f"/proc/{os.getpid()}/fd/{fd}" for name, fd in fds.items()}
    finally:
        for fd in fds.values():
            os.close(fd)


def test_processes_share_words_working_copies_and_slab_only() -> None:
    layout, num_shards = model_layout(), 2
    parts = [ShardLayout(layout, k, num_shards) for k in range(num_shards)]
    sizes = {
        "words": 8 * SharedUpdateState.num_words(3, num_shards),
        "working": 2 * layout.size,
        "slab": 4 * layout.size,
    }
    sizes |= {f"state {part.index}": part.num_bytes(PRECISION.state_kinds) for part in parts}
    context = multiprocessing.get_context("spawn")
    with memfds(sizes) as paths:
        words = SharedUpdateState(memoryview(mapped(paths["words"]).numpy()), 3, num_shards)
        words.reset(0, [range(3)] * num_shards)
        children = [context.Process(target=serve_in_a_process, args=(paths, k, num_shards)) for k in range(num_shards)]
        for child in children:
            child.start()
        try:
            Worker(layout, words, mapped(paths["slab"])).run(4, commit_first=False)
        finally:
            words.stop()
            for child in children:
                child.join(WAIT_S)
        assert [child.exitcode for child in children] == [0] * num_shards
        own = [state_tensors(mapped(paths[f"state {part.index}"]), part) for part in parts]
        state = ShardedState(parts, mapped(paths["working"]).view(PRECISION.working_dtype), own)
        assert_equal(state, reference(layout, 4, torch.bfloat16))


def test_a_failing_shard_is_flagged_and_leaves_its_layer_torn() -> None:
    with open_shards(PRECISION, 2) as shards:
        words, slab = new_words(), torch.zeros(4 * shards.layout.size, dtype=torch.uint8)
        failures = []
        with serving(shards, words, slab[:64], FORWARD) as loops:  # a slab that holds no whole gradient
            words.updates.commit(header(1))
            words.gradients.land(0, 1, 0)
            with pytest.raises(MegatrainError, match=r"optimizer shard [01] failed"):
                wait_generation(words, 0, 1)
        for loop in loops:
            try:
                loop.join(WAIT_S)
            except MegatrainError as error:
                failures.append(error)
        assert failures  # of the second one only if it began before it was stopped
        assert TornLayer(layer=0, update=1) in (words.generations.torn(0), words.generations.torn(1))


def test_stop_ends_idle_shards_and_whoever_waits_for_them() -> None:
    with open_shards(PRECISION, 2) as shards:
        words, slab = new_words(), torch.zeros(4 * shards.layout.size, dtype=torch.uint8)
        with serving(shards, words, slab, FORWARD) as loops:
            words.gradients.land(1, 1, 0)  # not the layer they wait for, nor is anything committed
        for loop in loops:
            loop.join(WAIT_S)
        with pytest.raises(MegatrainError, match="were stopped"):
            wait_generation(words, 0, 1)
        assert words.generations.of_layer(1) == 0


def test_a_loop_that_does_not_end_is_named() -> None:
    with open_shards(PRECISION, 1) as shards:
        words, slab = new_words(1), torch.zeros(1, dtype=torch.uint8)
        with serving(shards, words, slab, FORWARD) as loops, pytest.raises(DeadlineError, match="shard 0 did not end"):
            loops[0].join(0.0)
        loops[0].join(WAIT_S)
