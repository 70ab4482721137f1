"""SpillRing and SpillingShard: state on disk is updated as state in memory is, bit for bit, and outlives a process."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.undo_log import Journal, serial_of
from megatrain_ray.engine.plan.spill_layout import Extent, SpillLayout
from megatrain_ray.engine.shards.adam_shard import AdamShard, Gradient
from megatrain_ray.engine.shards.spilling_shard import SpillingShard
from megatrain_ray.engine.spill.spill_ring import SpillRing, SpillSlotState
from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.arenas.arena_holder import ArenaHolder
from megatrain_ray.io.files.disk_errors import UnreadableError
from megatrain_ray.io.saves.save_writer import Piece
from megatrain_ray.io.storage.blob_store import Blob, BlobStore, aligned_block
from megatrain_ray.io.storage.disk_io import DiskIo, SpillFile
from megatrain_ray.spans import Row
from tests.support.memory_store import MemoryStore
from tests.support.shards import (
    HYPER,
    Dictionary,
    flat_directions,
    flat_gradients,
    headers,
    model_layout,
    open_shards,
    poisoned,
    random_masters,
)

pytestmark = pytest.mark.pairwise

SPILLED = frozenset({0, 2})  # layer 1 is partly Muon's
ON_DISK = frozenset[int](), frozenset({2}), SPILLED  # layers whose working copies are there, too
FORWARD, BACKWARD = (0, 1, 2), (2, 1, 0)
WAIT_S = 60.0
BLOB = "spill"
PAGE = 4096
EXTENT_ELEMENTS = 1 << 12  # the first layer has several extents


class Watched(MemoryStore):
    """Tells when a block is about to be read or written, holds it up as long as `held` says so, and fails as told."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._blobs[BLOB] = bytearray(num_bytes)
        self.content = self._blobs[BLOB]
        self.calls: list[tuple[str, int]] = []
        self.changed = threading.Condition()
        self.held: set[str] = set()
        self.failing: dict[str, Exception] = {}

    @asynccontextmanager
    async def update(self, name: str) -> AsyncIterator[Blob]:
        async with super().update(name) as blob:
            yield _WatchedBlob(self, blob)

    def await_call(self, kind: str, offset: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: (kind, offset) in self.calls, WAIT_S)

    def release(self, kind: str) -> None:
        with self.changed:
            self.held.discard(kind)
            self.changed.notify_all()

    async def reach(self, kind: str, offset: int) -> None:
        await asyncio.to_thread(self._reach, kind, offset)

    def _reach(self, kind: str, offset: int) -> None:
        with self.changed:
            self.calls.append((kind, offset))
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: kind not in self.held, WAIT_S)
        if kind in self.failing:
            raise self.failing[kind]


@dataclass(frozen=True)
class _WatchedBlob:
    store: Watched
    blob: Blob

    async def read_into(self, offset: int, block: memoryview) -> None:
        await self.store.reach("read", offset)
        await self.blob.read_into(offset, block)

    async def write_at(self, offset: int, block: memoryview) -> None:
        await self.store.reach("write", offset)
        await self.blob.write_at(offset, block)


@dataclass(frozen=True)
class Memory:
    """Holds what outlives a shard's process: its memory and its blob."""

    part: ShardLayout
    layout: SpillLayout
    working: Tensor
    own: Mapping[str, Tensor]
    slots: Tensor
    journal: memoryview
    store: BlobStore
    name: str = BLOB

    def shard(self, num_threads: int = 2, timeout_s: float = WAIT_S) -> SpillingShard:
        return SpillingShard(
            self.ring(timeout_s), self.part, Precision.BF16, working=self.working, own=self.own, hyper=HYPER,
            num_threads=num_threads, journal=self.journal,
        )  # fmt: skip

    def ring(self, timeout_s: float = WAIT_S) -> SpillRing:
        return SpillRing(self.layout, self.slots, self.store, self.name, timeout_s, poison=True)


def memory_of(
    index: int = 0,
    num_shards: int = 1,
    order: Sequence[int] = FORWARD,
    num_slots: int = 2,
    working: Tensor | None = None,
    store: BlobStore | None = None,
    name: str = BLOB,
    spilled: frozenset[int] = SPILLED,
    stored: frozenset[int] = frozenset(),
    offload_dtype: torch.dtype = torch.float32,
    on_disk: frozenset[int] = frozenset(),
) -> Memory:
    """Return the memory of a shard. `on_disk`: layers of `spilled` whose working copies are there, too."""
    model = model_layout()
    part = ShardLayout(model, index, num_shards, spilled=spilled, on_disk=on_disk)
    layout = SpillLayout.of(part, Precision.BF16, order, num_slots, EXTENT_ELEMENTS, stored, offload_dtype)
    return Memory(
        part,
        layout,
        poisoned(part.working_size, torch.bfloat16) if working is None else working,
        {kind: poisoned(part.size_of(kind), dtype) for kind, dtype in Precision.BF16.state_kinds},
        torch.frombuffer(aligned_block(layout.memory_bytes), dtype=torch.uint8),
        memoryview(bytearray(Journal.num_bytes(part, Precision.BF16, 2))),
        Watched(layout.blob_bytes) if store is None else store,
        name,
    )


@contextmanager
def opened(memories: Sequence[Memory]) -> Iterator[list[SpillingShard]]:
    shards = [memory.shard() for memory in memories]
    try:
        yield shards
    finally:
        for shard in shards:
            shard.close()


def update(shards: Sequence[AdamShard], number: int, order: Sequence[int]) -> None:
    layout = model_layout()
    header = headers(number)[-1]
    gradients, directions = flat_gradients(layout, number, torch.float32), flat_directions(layout, number)
    for layer in order:
        for shard in shards:
            serial = serial_of(number, layer, len(layout.layers))
            shard.update(layer, gradients[layer], header, serial, directions[layer])


def content(shards: Sequence[AdamShard]) -> dict[tuple[str, str, int], bytes]:
    """Return the bytes of every piece of a save."""

    def read(piece: Piece, shard: AdamShard) -> bytes:
        return b"".join(bytes(view) for part in piece.cut(4096) for view in shard.fetch(part).chunks())

    pieces = [(piece, shard) for shard in shards for layer in range(3) for piece in shard.pieces(layer)]
    return {(piece.layer, piece.kind, piece.start): read(piece, shard) for piece, shard in pieces}


def restore(piece: Piece, saved: Mapping[tuple[str, str, int], bytes]) -> None:
    """Fill the piece from the saved piece that it is a part of."""
    start, whole = max(
        (start, whole)
        for (layer, kind, start), whole in saved.items()
        if (layer, kind) == (piece.layer, piece.kind) and start <= piece.start
    )
    at = (piece.start - start) * (sum(map(len, piece.buffers)) // (piece.stop - piece.start))
    for buffer in piece.buffers:
        buffer[:] = whole[at : at + len(buffer)]  # type: ignore[index]
        at += len(buffer)


def updated_in_memory(num_shards: int, num_updates: int, order: Sequence[int]) -> dict[tuple[str, str, int], bytes]:
    with open_shards(Precision.BF16, num_shards) as expected:
        expected.load(Dictionary(random_masters(model_layout())))
        for number in range(1, num_updates + 1):
            update(expected.shards, number, order)
        return content(expected.shards)


@pytest.mark.parametrize("order", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize(("num_shards", "num_slots"), [(1, 1), (1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("on_disk", ON_DISK, ids=["state", "a working copy", "working copies"])
def test_updates_are_those_of_state_in_memory(
    on_disk: frozenset[int], num_shards: int, num_slots: int, order: Sequence[int]
) -> None:
    working = memory_of(on_disk=on_disk).working
    memories = [memory_of(k, num_shards, order, num_slots, working, on_disk=on_disk) for k in range(num_shards)]
    with opened(memories) as shards:
        for shard in shards:
            shard.load(Dictionary(random_masters(model_layout())), 2)
        for number in range(1, 6):
            update(shards, number, order)
        assert content(shards) == updated_in_memory(num_shards, 5, order)
    assert all(memory.part.size < ShardLayout(model_layout(), 0, num_shards).size for memory in memories)


def test_in_a_file_on_disk(tmp_path: Path) -> None:
    layout = memory_of().layout
    with closing(ArenaHolder.create({}, {"spill-0": SpillFile(tmp_path, layout.blob_bytes)})) as holder:
        store, name = holder.spill("spill-0", DiskIo.POSIX)
        with opened([memory_of(num_slots=1, store=store, name=name)]) as shards:
            shards[0].load(Dictionary(random_masters(model_layout())), 2)
            for number in range(1, 4):
                update(shards, number, FORWARD)
            assert content(shards) == updated_in_memory(1, 3, FORWARD)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("on_disk", ON_DISK)
def test_a_save_restores_what_spills(on_disk: frozenset[int]) -> None:
    with opened([memory_of(on_disk=on_disk)]) as shards, opened([memory_of(num_slots=1, on_disk=on_disk)]) as others:
        shards[0].load(Dictionary(random_masters(model_layout())))
        update(shards, 1, FORWARD)
        saved = content(shards)
        for pieces in others[0].restorable():
            for piece in pieces:
                restore(piece, saved)
        assert content(others) == saved
        for each in (shards, others):
            update(each, 2, FORWARD)
        assert content(others) == content(shards)


@pytest.mark.parametrize("on_disk", ON_DISK)
def test_a_copy_of_a_layer_that_is_on_disk(on_disk: frozenset[int]) -> None:
    with opened([memory_of(num_slots=1, on_disk=on_disk)]) as shards:
        shards[0].load(Dictionary(random_masters(model_layout())))
        update(shards, 1, FORWARD)
        expected = content(shards)
        room = torch.zeros(shards[0].copy_bytes(2), dtype=torch.uint8)
        pieces = shards[0].copy_layer(2, room)
        update(shards, 2, FORWARD)
        assert {(p.layer, p.kind, p.start): b"".join(map(bytes, p.buffers)) for p in pieces}.items() <= expected.items()


def small_ring(store: Watched, slots: Tensor, num_slots: int, timeout_s: float = WAIT_S) -> SpillRing:
    """Return a ring of four layers of a page each."""
    extents = [
        Extent(layer, ElementRange(0, 1024), PAGE * layer, PAGE, {"m": ElementRange(0, PAGE)}, layer)
        for layer in range(4)
    ]
    return SpillRing(SpillLayout(extents, num_slots), slots, store, BLOB, timeout_s, poison=True)


def fill_small(ring: SpillRing) -> None:
    for layer in range(4):
        with ring.overwrite(layer):
            ring.bytes_of(layer)["m"].fill_(layer)
    for layer in range(4):
        assert set(ring.read(layer, ElementRange(0, PAGE))) == {layer}


def all_are_read(ring: SpillRing) -> bool:
    return all(slot.state is SpillSlotState.READY for slot in ring._slots)


def await_all_read(ring: SpillRing) -> None:
    with ring._changed:
        assert ring._changed.wait_for(lambda: all_are_read(ring), WAIT_S)


def small_slots() -> Tensor:
    return torch.frombuffer(aligned_block(4 * PAGE), dtype=torch.uint8)


def test_what_comes_next_is_read_while_a_layer_is_updated() -> None:
    store = Watched(4 * PAGE)
    with closing(small_ring(store, small_slots(), 3)) as ring:
        fill_small(ring)
        ring.acquire(0)
        store.calls.clear()
        ring.acquire(0)
        ring.mark_dirty(0)
        store.held.add("write")
        ring.release(0)
        ring.acquire(1)  # does not wait for what is being written
        ring.release(1)
        store.await_call("read", 3 * PAGE)  # nobody has asked for it
        store.release("write")
        for layer in (2, 3):
            ring.acquire(layer)
            assert set(ring.bytes_of(layer)["m"].tolist()) == {layer}
            ring.release(layer)
        store.await_call("read", PAGE)  # for the next update
        ring.acquire(0)
        ring.release(0)
        assert ("read", 0) not in store.calls  # it was among the next three all the time


def test_spans_of_the_disk_are_in_the_traces_of_the_shard() -> None:
    with opened([memory_of(num_slots=1)]) as shards:
        shards[0].load(Dictionary(random_masters(model_layout())))
        update(shards, 1, FORWARD)
        content(shards)  # all is written
        shards[0].spans.on = True
        update(shards, 2, FORWARD)
        content(shards)
        spans = shards[0].spans.take().spans
        assert {(span.name, span.layer) for span in spans if span.row is Row.DISK} >= {("read", 2), ("write", 0)}
        waits = [span.layer for span in spans if span.row is Row.UPDATES and span.name == "wait disk" and span.waits]
        of_layers = [extent.layer for extent in shards[0]._ring.layout.extents]
        assert waits == of_layers == [0, 0, 0, 2]
        written = [span.num_bytes for span in spans if (span.name, span.layer) == ("write", 0)]
        assert written == [extent.nbytes for extent in shards[0]._ring.layout.extents[:3]]


def test_what_did_not_change_is_not_written() -> None:
    store = Watched(4 * PAGE)
    with closing(small_ring(store, small_slots(), 2)) as ring:
        fill_small(ring)
        store.calls.clear()
        for layer in (*range(4), *range(4)):
            ring.acquire(layer)
            ring.release(layer)
        assert not [offset for kind, offset in store.calls if kind == "write"]


def test_a_save_reads_a_layer_once_the_blob_has_its_update() -> None:
    memory = memory_of(num_slots=3)  # for all of it
    store = memory.store
    assert isinstance(store, Watched)
    with opened([memory]) as shards:
        shards[0].load(Dictionary(random_masters(model_layout())))
        content(shards)  # all is written
        store.calls.clear()
        store.held.add("write")
        header, gradients = headers(1)[-1], flat_gradients(model_layout(), 1, torch.float32)
        shards[0].update(0, gradients[0], header, serial_of(1, 0, 3))
        store.await_call("write", 0)
        seen: list[dict[tuple[str, str, int], bytes]] = []
        reader = threading.Thread(target=lambda: seen.append(content(shards)))
        reader.start()
        assert store.calls.count(("read", 0)) == 1  # for the update
        store.release("write")
        reader.join(WAIT_S)
        with open_shards(Precision.BF16, 1) as expected:
            expected.load(Dictionary(random_masters(model_layout())))
            expected.shards[0].update(0, gradients[0], header, serial_of(1, 0, 3))
            assert seen == [content(expected.shards)]


@pytest.mark.parametrize("on_disk", ON_DISK)
def test_another_process_goes_on_with_a_slot_that_is_dirty(on_disk: frozenset[int]) -> None:
    """The first one died in the middle of an update: its journal takes that back, and it is made again."""
    memory = memory_of(num_slots=1, on_disk=on_disk)
    store = memory.store
    assert isinstance(store, Watched)
    first = memory.shard()
    first.load(Dictionary(random_masters(model_layout())))
    update([first], 1, FORWARD)
    store.calls.clear()
    # As if the process died: the kernel has written some blocks, nothing is left, nothing is written any more.
    header, gradients = headers(2)[-1], flat_gradients(model_layout(), 2, torch.float32)
    changed = first._changing_extents(0)
    for _ in range(2):  # one extent is left, one is not
        AdamShard._update(first, 0, Gradient(gradients[0]), header, serial_of(2, 0, 3), within=next(changed))
    Journal(memory.journal, memory.part, Precision.BF16, 2)  # its marks say which blocks are done
    first.close()  # a process that died moves nothing any more
    with opened([memory]) as shards:
        shards[0].roll_back(0, serial_of(2, 0, 3))
        update(shards, 2, FORWARD)
        assert content(shards) == updated_in_memory(1, 2, FORWARD)


def test_a_shard_that_died_in_an_update_that_changes_nothing_has_its_slot_written() -> None:
    memory = memory_of(num_slots=1)
    first = memory.shard()
    first.load(Dictionary(random_masters(model_layout())))
    update([first], 1, FORWARD)
    content([first])  # all is written
    first.close()
    with closing(memory.shard(timeout_s=5.0)) as second:
        second.roll_back(2, serial_of(2, 2, 3))
        skipped = replace(headers(2)[-1], skip=True)
        second.update(2, flat_gradients(model_layout(), 2, torch.float32)[2], skipped, serial_of(2, 2, 3))
        assert content([second]) == updated_in_memory(1, 1, FORWARD)
        update([second], 2, FORWARD)
        assert content([second]) == updated_in_memory(1, 2, FORWARD)


def test_a_slot_that_nobody_wrote_back_is_written_by_the_next_process() -> None:
    memory = memory_of(num_slots=1)
    store = memory.store
    assert isinstance(store, Watched)
    first = memory.ring()
    with first.overwrite(0):
        first._slots[0].memory.fill_(1)
    first.acquire(0)
    first.mark_dirty(0)
    first.bytes_of(0)["m"].fill_(7)
    first.close()
    with closing(memory.ring()) as second:
        span = memory.layout.extents[0].kinds["m"]
        assert set(second.read(0, span)) == {7}
        second.acquire(2)
        second.release(2)
        second.acquire(0)
        assert set(second.bytes_of(0)["m"].tolist()) == {7}
        second.release(0)


def test_damage_on_the_disk_fails_the_update_and_the_save() -> None:
    memory = memory_of(num_slots=1)
    store = memory.store
    assert isinstance(store, Watched)
    with opened([memory]) as shards:
        shards[0].load(Dictionary(random_masters(model_layout())))
        update(shards, 1, FORWARD)
        content(shards)  # all is written
        for layer in SPILLED:
            store.content[memory.layout.extents[layer].start + 100] ^= 1
        with pytest.raises(MegatrainError, match=r"spill in memory: bytes \d+ to \d+ are not what was written there"):
            shards[0].fetch(next(piece for piece in shards[0].pieces(0) if piece.kind == "residual"))
        with pytest.raises(MegatrainError, match="are not what was written there"):
            update(shards, 2, FORWARD)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_error_of_the_disk_is_told_to_whoever_waits(kind: str) -> None:
    memory = memory_of(num_slots=1)
    store = memory.store
    assert isinstance(store, Watched)
    with opened([memory]) as shards:
        shards[0].load(Dictionary(random_masters(model_layout())))
        store.failing[kind] = UnreadableError("cannot read spill: Input/output error")
        with pytest.raises(UnreadableError, match="Input/output error"):
            update(shards, 1, FORWARD)
            update(shards, 2, FORWARD)


def test_a_blob_that_is_not_there_fails_at_once() -> None:
    memory = memory_of(store=MemoryStore())
    with pytest.raises(UnreadableError, match="no such blob"):
        memory.ring()


def test_closing_begins_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """When what is being written is done the slots would be free to read ahead."""
    store = Watched(4 * PAGE)
    ring = small_ring(store, small_slots(), 2)
    fill_small(ring)
    store.calls.clear()
    store.held.add("write")
    for layer in (0, 1):
        ring.acquire(layer)
        ring.mark_dirty(layer)
        ring.release(layer)
    for layer in (0, 1):
        store.await_call("write", PAGE * layer)
    store.calls.clear()
    join = ring._transfers._thread.join

    def release_and_join(timeout_s: float) -> None:
        store.release("write")
        join(timeout_s)

    monkeypatch.setattr(ring._transfers._thread, "join", release_and_join)
    ring.close()
    assert not store.calls
    assert not caplog.records


def test_a_disk_that_does_not_answer_is_a_deadline() -> None:
    memory = memory_of(num_slots=1)
    store = memory.store
    assert isinstance(store, Watched)
    ring = memory.ring(timeout_s=0.01)
    store.held.add("write")
    with ring.overwrite(0):
        pass
    with pytest.raises(
        DeadlineError, match="elements 0 to 4096 of layer 0 to be written: spill in memory does not get on"
    ):
        ring.read(0, ElementRange(0, 4096))
    store.release("write")
    ring.close()


def test_a_shard_that_died_loading_leaves_nothing_of_that() -> None:
    """Its slots hold what its successor loads once more, one of them torn."""
    store, slots = Watched(4 * PAGE), small_slots()
    first = small_ring(store, slots, 3)
    store.held.add("write")  # a slot each
    for layer in (0, 1):
        with first.overwrite(layer):
            first.bytes_of(layer)["m"].fill_(layer)
    first.overwrite(2).__enter__()
    first.bytes_of(2)["m"].fill_(99)
    # Nothing that the first one has begun ends before the second one is done, as if it were dead.
    with closing(small_ring(Watched(4 * PAGE), slots, 3)) as second:
        for layer in range(4):
            with second.overwrite(layer):
                second.bytes_of(layer)["m"].fill_(layer)
            second.read(layer, ElementRange(0, PAGE))  # all slots are free again
        for layer in (*range(4), *range(4)):
            second.acquire(layer)
            assert set(second.bytes_of(layer)["m"].tolist()) == {layer}
            second.release(layer)
    store.release("write")
    first.close()


def test_what_is_left_behind_what_came_after_it_is_not_read_again() -> None:
    """A gradient, which stays while the state of its part is updated."""
    store = Watched(4 * PAGE)
    with closing(small_ring(store, small_slots(), 3)) as ring:
        fill_small(ring)
        ring.acquire(0)
        for layer in (1, 2):
            ring.acquire(layer)
            ring.release(layer)
        ring.acquire(3)

        await_all_read(ring)  # what comes first in the next update is there
        with ring._changed:
            ring.release(0)
            assert all_are_read(ring)


def test_what_is_wanted_is_read_though_all_slots_hold_what_comes_after_it() -> None:
    """One is held, as a gradient is, and to the others came, late, what comes next but one."""
    store = Watched(4 * PAGE)
    with closing(small_ring(store, small_slots(), 2, timeout_s=20.0)) as ring:
        fill_small(ring)
        ring.acquire(0)
        await_all_read(ring)  # or the read of layer 1 would be held up
        store.held.add("read")
        store.calls.clear()
        with ring._changed:
            ring._at = 2
            ring._advance()
        store.await_call("read", 2 * PAGE)
        reader = threading.Thread(target=ring.acquire, args=(1,))
        reader.start()
        while ring._at != 1:  # it waits for its extent from then on
            time.sleep(0.001)
        store.release("read")
        reader.join(WAIT_S)
        assert set(ring.bytes_of(1)["m"].tolist()) == {1}
        ring.release(1)
        ring.release(0)


def test_a_layer_that_nobody_expected_next_is_read() -> None:
    store = Watched(4 * PAGE)
    with closing(small_ring(store, small_slots(), 1, timeout_s=5.0)) as ring:
        fill_small(ring)
        ring.acquire(0)
        store.held.add("read")
        ring.release(0)
        store.await_call("read", PAGE)  # into the only slot
        threading.Timer(0.1, store.release, ["read"]).start()
        ring.acquire(3)
        assert set(ring.bytes_of(3)["m"].tolist()) == {3}
        ring.release(3)


def test_a_save_hears_of_a_disk_that_does_not_answer() -> None:
    store = Watched(4 * PAGE)
    with closing(small_ring(store, small_slots(), 2)) as ring:
        fill_small(ring)
        store.held.add("read")
        ring._transfers.timeout_s = 0.01
        with pytest.raises(DeadlineError, match="waited 0 s for block 1 to be read: spill in memory does not get on"):
            ring.read(1, ElementRange(0, PAGE))
        store.release("read")


@pytest.mark.parametrize(("kind", "layer"), [("read", 0), ("write", 1)])
def test_a_save_that_reads_ends_with_the_ring(kind: str, layer: int) -> None:
    """Though the disk does not answer: what made the shard fail must be heard."""
    store = Watched(4 * PAGE)
    ring = small_ring(store, small_slots(), 2)
    fill_small(ring)
    ring.acquire(1)
    store.calls.clear()
    store.held.add(kind)
    ring.mark_dirty(1)
    if kind == "write":
        ring.release(1)
    failures: list[BaseException] = []

    def save() -> None:
        try:
            ring.read(layer, ElementRange(0, PAGE))
        except MegatrainError as error:
            failures.append(error)

    reader = threading.Thread(target=save)
    reader.start()
    store.await_call(kind, layer * PAGE)
    start_s = time.monotonic()
    ring.close()
    reader.join(WAIT_S)
    assert time.monotonic() - start_s < WAIT_S / 2
    assert [str(failure) for failure in failures] == ["spill in memory is not used any more"]
    with pytest.raises(MegatrainError, match="is not used any more"):
        ring.read(0, ElementRange(0, PAGE))
    store.release(kind)
    ring._transfers._thread.join(WAIT_S)


def test_gradients_wait_between_slots_and_disk() -> None:
    """Slots are filled with gradients as these arrive, and nothing is read meanwhile.

    Then gradients are read in the order of updates, and nothing beyond them: the blob still has those of the update
    before, or none at all.
    """
    store = Watched(4 * PAGE)
    kinds = [{"gradient": ElementRange(0, PAGE)}, {"m": ElementRange(0, PAGE)}] * 2
    extents = [Extent(i // 2, ElementRange(0, 1024), PAGE * i, PAGE, kind, i) for i, kind in enumerate(kinds)]
    with closing(SpillRing(SpillLayout(extents, 3), small_slots(), store, BLOB, WAIT_S, poison=True)) as ring:
        for state in (1, 3):
            with ring.overwrite(state):
                ring.bytes_of(state)["m"].fill_(10 + state)
        for update in range(1, 4):
            for gradient in (2, 0):
                with ring.overwrite(gradient):
                    ring.bytes_of(gradient)["gradient"].fill_(update + gradient)
            assert not [call for call in store.calls if call[0] == "read"]
            for gradient in (0, 2):
                ring.acquire(gradient)
                assert set(ring.bytes_of(gradient)["gradient"].tolist()) == {update + gradient}
                ring.acquire(gradient + 1)
                ring.mark_dirty(gradient + 1)
                assert set(ring.bytes_of(gradient + 1)["m"].tolist()) == {11 + gradient + 10 * (update - 1)}
                ring.bytes_of(gradient + 1)["m"].add_(10)
                mark = len(store.calls)
                ring.release(gradient + 1)
                ring.release(gradient)
            ring.read(3, ElementRange(0, PAGE))  # all is written
            beyond = [call for call in store.calls[mark:] if call[0] == "read" and call[1] < 3 * PAGE]
            assert not beyond
            written = sorted(offset for kind, offset in store.calls if kind == "write")
            assert written == [0, PAGE, *([PAGE] if update == 1 else []), 2 * PAGE, *[3 * PAGE] * (1 + (update == 1))]
            store.calls.clear()


@pytest.mark.parametrize("spilled", [{0, 2}, {0}, {2}, set()], ids=str)
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("offload_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_with_gradients_from_disk_are_those_without(
    num_shards: int, offload_dtype: torch.dtype, spilled: set[int]
) -> None:
    """The slab has other things by then."""
    working, stored = poisoned(model_layout().size, torch.bfloat16), frozenset({0, 2})
    memories = [
        memory_of(k, num_shards, FORWARD, 2, working, None, BLOB, frozenset(spilled), stored, offload_dtype)
        for k in range(num_shards)
    ]
    with opened(memories) as shards, open_shards(Precision.BF16, num_shards) as expected:
        for shard in (*shards, *expected.shards):
            shard.load(Dictionary(random_masters(model_layout())), 2)
        for number in range(1, 4):
            header = headers(number)[-1]
            gradients = flat_gradients(model_layout(), number, offload_dtype)
            directions = flat_directions(model_layout(), number)
            for shard in shards:
                for layer in sorted(stored, reverse=True):
                    slab = gradients[layer].clone()
                    shard.store(layer, slab)
                    slab.fill_(math.nan)
            for layer in FORWARD:
                serial = serial_of(number, layer, 3)
                for shard in shards:
                    gradient = None if layer in stored else gradients[layer]
                    shard.update(layer, gradient, header, serial, directions[layer])
                for other in expected.shards:
                    other.update(layer, gradients[layer], header, serial, directions[layer])
        assert content(shards) == content(expected.shards)
