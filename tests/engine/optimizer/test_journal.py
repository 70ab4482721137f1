"""Updates as transactions: whatever a kill leaves, rolling back and forward gives what no kill would have given."""

from __future__ import annotations

import functools
from enum import Enum

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.optimizer.undo_log import BLOCK_UNITS, UNIT_ELEMENTS, Journal, ParamSlice
from megatrain_ray.errors import MegatrainError
from tests.support.transactions import KERNELS, MAX_THREADS, Memory, header, one_layer

pytestmark = pytest.mark.pairwise

PRECISIONS = [Precision.BF16, Precision.FP32, Precision.BF16_NARROW, Precision.FP32_NARROW]
OLD, TORN = 40, 41  # serials
DIRECTIONS = Memory.anonymous(Precision.FP32).directions()


class Phase(Enum):
    """Says how far a thread got with its block."""

    DISARMED = "the room is half written, the record says nothing"
    ARMED = "nothing is overwritten yet"
    HALF = "half of the elements are overwritten"
    WRITTEN = "all are overwritten, no unit is marked"
    MARKING = "all units but the last are marked"
    DONE = "all units are marked, the record still says the block"


@functools.cache
def filled(precision: Precision) -> Memory:
    """Return filled memory, which callers copy and leave as it is."""
    return Memory.anonymous(precision).fill()


@functools.cache
def updated(precision: Precision) -> Memory:
    """Return the filled memory after an undisturbed update 1."""
    after = filled(precision).copy()
    with after.shard(KERNELS["torch"]) as shard:
        shard.update(0, after.gradient(1), header(1), TORN, DIRECTIONS)
    return after


def parts_of(memory: Memory) -> list[ParamSlice]:
    with memory.shard(KERNELS["native"]) as shard:
        return shard.parts(0, shard.hyper)


class Crash:
    """Makes a journal and state as threads leave them that were killed in transaction TORN."""

    def __init__(self, precision: Precision) -> None:
        self.memory = filled(precision).copy()
        self._journal = Journal(self.memory.journal, self.memory.part, self.memory.precision, MAX_THREADS)
        self._parts = parts_of(self.memory)
        self._after = parts_of(updated(precision))

    def age(self) -> None:
        """Leave records and marks of an older transaction in the journal."""
        for thread, part in enumerate(self._parts[:MAX_THREADS]):
            units = ElementRange(part.first_unit, part.first_unit + 1)
            self._journal.save(thread, units, part.state.cut(part.elements(units)), OLD)
        self._journal.mark(ElementRange(0, self._parts[-1].units.stop // 2), OLD)

    def thread_at(self, thread: int, units: ElementRange, phase: Phase) -> None:
        part, after = next((p, a) for p, a in zip(self._parts, self._after, strict=True) if units.start < p.units.stop)
        elements = part.elements(units)
        state, new = part.state.cut(elements), after.state.cut(elements)
        self._journal.save(thread, units, state, TORN if phase is not Phase.DISARMED else 0)
        if phase is Phase.DISARMED:
            for _, kept in self._journal._kept(thread, state):
                kept.view(torch.uint8)[: kept.nbytes // 2] = 0xFF
        written = {Phase.DISARMED: 0, Phase.ARMED: 0, Phase.HALF: elements.size // 2}.get(phase, elements.size)
        for old, value in zip(state, new, strict=True):
            if old is not None and value is not None:
                old[:written] = value[:written]
        last = {Phase.MARKING: units.stop - 1, Phase.DONE: units.stop}.get(phase, units.start)
        if last > units.start:
            self._journal.mark(ElementRange(units.start, last), TORN)


def recover(memory: Memory, kernel: str, num_threads: int) -> None:
    with memory.shard(KERNELS[kernel], num_threads) as shard:
        shard.roll_back(0, TORN)
        shard.update(0, memory.gradient(1), header(1), TORN, DIRECTIONS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("phase", Phase)
def test_a_block_torn_at_each_step(phase: Phase, precision: Precision, kernel: str) -> None:
    crash = Crash(precision)
    crash.thread_at(0, ElementRange(0, BLOCK_UNITS), phase)
    large, norm, _, _, matrix = (part.units for part in parts_of(crash.memory))
    crash.thread_at(1, ElementRange(BLOCK_UNITS, large.stop), phase)
    crash.thread_at(2, norm, phase)
    crash.thread_at(3, ElementRange(matrix.start, matrix.start + BLOCK_UNITS), phase)
    recover(crash.memory, kernel, 2)
    crash.memory.assert_equal(updated(precision))


def test_without_rolling_back_a_torn_block_would_be_updated_twice() -> None:
    crash = Crash(Precision.BF16)
    crash.thread_at(0, ElementRange(0, BLOCK_UNITS), Phase.HALF)
    with crash.memory.shard(KERNELS["native"]) as shard:
        shard.update(0, crash.memory.gradient(1), header(1), TORN, DIRECTIONS)
    with pytest.raises(AssertionError, match="bytes differ"):
        crash.memory.assert_equal(updated(Precision.BF16))


@st.composite
def crashes(draw: st.DrawFn) -> list[tuple[int | None, ElementRange, Phase]]:
    """Draw the state of every block: done, untouched (not listed) or on the way, in at most one block of a thread."""
    threads = iter(range(MAX_THREADS))
    found: list[tuple[int | None, ElementRange, Phase]] = []
    for part in parts_of(filled(Precision.FP32)):
        start = part.units.start
        while start < part.units.stop:
            units = ElementRange(start, min(start + draw(st.sampled_from([1, 40, BLOCK_UNITS])), part.units.stop))
            start = units.stop
            fate = draw(st.sampled_from(["untouched", "done", "on the way"]))
            thread = next(threads, None) if fate == "on the way" else None
            if fate == "done":
                found.append((None, units, Phase.DONE))
            elif thread is not None:
                found.append((thread, units, draw(st.sampled_from(Phase))))
    return found


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    blocks=crashes(),
    precision=st.sampled_from(PRECISIONS),
    kernel=st.sampled_from(sorted(KERNELS)),
    num_threads=st.integers(1, MAX_THREADS),
    aged=st.booleans(),
)
def test_any_crash_is_recovered(
    blocks: list[tuple[int | None, ElementRange, Phase]],
    precision: Precision,
    kernel: str,
    num_threads: int,
    aged: bool,
) -> None:
    crash = Crash(precision)
    if aged:
        crash.age()
    # What a thread did before is overwritten in its record by what it does last.
    for thread, units, phase in sorted(blocks, key=lambda block: block[0] is not None):
        crash.thread_at(thread or 0, units, phase)
    recover(crash.memory, kernel, num_threads)
    crash.memory.assert_equal(updated(precision))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_transaction_is_done_once(kernel: str) -> None:
    memory, after = filled(Precision.BF16).copy(), updated(Precision.BF16)
    with memory.shard(KERNELS[kernel], 2) as shard:
        for _ in range(2):
            shard.roll_back(0, TORN)
            shard.update(0, memory.gradient(1), header(1), TORN, DIRECTIONS)
        memory.assert_equal(after)
        shard.update(0, memory.gradient(1), header(1), TORN + 1, DIRECTIONS)
    with pytest.raises(AssertionError, match="bytes differ"):
        memory.assert_equal(after)


def test_a_roll_back_that_is_killed_is_done_again() -> None:
    crash = Crash(Precision.BF16)
    crash.thread_at(0, ElementRange(0, BLOCK_UNITS), Phase.MARKING)
    half_back = crash.memory.copy()
    first = parts_of(half_back)[0].state.cut(ElementRange(0, 1000))
    for tensor, old in zip(first, parts_of(filled(Precision.BF16))[0].state.cut(ElementRange(0, 1000)), strict=True):
        if tensor is not None and old is not None:
            tensor.copy_(old)
    recover(half_back, "native", 1)
    half_back.assert_equal(updated(Precision.BF16))


def test_a_journal_made_for_fewer_threads_or_a_smaller_shard_is_refused() -> None:
    part = one_layer(Precision.BF16)
    memory = memoryview(bytearray(Journal.num_bytes(part, Precision.BF16, 2)))
    Journal(memory, part, Precision.BF16, 2)
    Journal(memory, part, Precision.BF16, 1)
    with pytest.raises(MegatrainError, match=r"made for 2 threads, expected .* 3 threads or more"):
        Journal(memory, part, Precision.BF16, 3)
    with pytest.raises(MegatrainError, match=r"shard 0: a journal of .* bytes made for 2 threads"):
        Journal(memory[:-1], part, Precision.BF16, 2)


def test_size() -> None:
    """A room for a block each, and little else."""
    for precision, itemsize in zip(PRECISIONS, (12, 12, 8, 8), strict=True):
        part = one_layer(precision)
        rooms = 16 * BLOCK_UNITS * UNIT_ELEMENTS * itemsize
        assert rooms <= Journal.num_bytes(part, precision, 16) <= rooms + 8192


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_copied_layer_keeps_what_later_updates_change(kernel: str, precision: Precision) -> None:
    memory = filled(precision).copy()
    with memory.shard(KERNELS[kernel], 3) as shard:
        pieces = [(piece, b"".join(piece.buffers)) for piece in shard.pieces(0)]
        copies = shard.copy_layer(0, torch.empty(shard.copy_bytes(0), dtype=torch.uint8))
        shard.update(0, memory.gradient(1), header(1), 1, DIRECTIONS)
        changed = [b"".join(piece.buffers) for piece in shard.pieces(0)]
    assert [copy[:4] for copy in copies] == [piece[:4] for piece, _ in pieces]
    assert [b"".join(copy.buffers) for copy in copies] == [data for _, data in pieces]
    assert all(old != new for (_, old), new in zip(pieces, changed, strict=True))
