"""Activations on disk: in which order they move, through how much memory, and what a disk may do to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatrain_ray.engine.activations import disk_activations
from megatrain_ray.engine.activations.disk_activations import DiskActivations, OffloadedToDisk
from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.activation_staging import DiskAllocator, StorageSpan
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_groups import DiskSettings
from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.files.disk_errors import DiskFullError, UnreadableError
from megatrain_ray.io.storage.blob_store import aligned
from megatrain_ray.virtual_clock import Op, Stage
from tests.engine.spill.test_spill_ring import BLOB, PAGE, WAIT_S, Watched
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

SIZE = 2 * PAGE + 100  # of what a layer leaves: three blocks
LAYERS = (1, 2, 3)


def plan_of(num_windows: int, activations: tuple[int, ...] = (SIZE,) * len(LAYERS)) -> Plan:
    plan = SimpleNamespace(
        disk=DiskSettings(num_staging_buffers=num_windows, staging_buffer_bytes=PAGE),
        disk_activations=activations,
        activation_file_bytes=sum(map(aligned, activations)),
        total_bytes=lambda tier: 0,
    )  # fmt: skip
    return cast(Plan, plan)


@dataclass
class Desk:
    """Holds a file with three places, and what was put into them."""

    file: DiskActivations
    device: CpuDevice
    store: Watched
    tensors: dict[int, torch.Tensor]
    away: dict[int, OffloadedToDisk]

    def send(self, layer: int) -> None:
        self.tensors[layer] = torch.arange(SIZE, dtype=torch.int64).mul(layer).to(torch.uint8)
        op = Op("boundary", layer, 0, num_bytes=SIZE)
        self.away[layer] = self.file.send(op, [self.tensors[layer].untyped_storage()])

    def let_go(self, layer: int) -> None:
        self.device.wait(self.away[layer].offloaded(), "d2h")
        for storage in self.away[layer].storages:
            storage.resize_(0)

    def bring_back(self, layer: int) -> None:
        self.away[layer].reload()
        self.device.wait(self.away[layer].reloaded(), "h2d")

    def assert_back(self, layer: int) -> None:
        assert torch.equal(self.tensors[layer], torch.arange(SIZE, dtype=torch.int64).mul(layer).to(torch.uint8))


@contextmanager
def desk(num_windows: int) -> Iterator[Desk]:
    plan, device = plan_of(num_windows), CpuDevice()
    store = Watched(plan.activation_file_bytes)
    file = DiskActivations(plan, device, store, BLOB, poison=True)
    try:
        file.begin()
        yield Desk(file, device, store, {}, {})
    finally:
        store.held.clear()
        store.release("")
        file.close()
        device.close()


def test_storages_lie_one_behind_the_other_in_blocks() -> None:
    places = DiskAllocator(plan_of(2, (2 * PAGE, PAGE)))
    first = places.take(1, [PAGE + 100, 50, PAGE - 200])
    assert [block.parts for block in first] == [
        (StorageSpan(0, ElementRange(0, PAGE), 0),),
        (
            StorageSpan(0, ElementRange(PAGE, PAGE + 100), 0),
            StorageSpan(1, ElementRange(0, 50), 100),
            StorageSpan(2, ElementRange(0, PAGE - 200), 150),
        ),
    ]
    (second,) = places.take(2, [10])
    extents = [block.extent for block in (*first, second)]
    assert [(e.start, e.nbytes, e.first_block) for e in extents] == [(0, PAGE, 0), (PAGE, PAGE, 1), (2 * PAGE, PAGE, 2)]
    with pytest.raises(MegatrainError, match=r"take 16384 bytes of disk, the plan has 12288 .* larger than planned"):
        places.take(3, [1])
    places.clear()
    assert places.take(3, [1])[0].extent.start == 0


def test_one_window_moves_one_block_after_the_other() -> None:
    """Blocks go out in the order of the forward, and come back in that of the backward."""
    with desk(1) as at:
        for layer in LAYERS:
            at.send(layer)
        for layer in LAYERS:
            at.let_go(layer)
        at.file.expect([at.away[layer] for layer in reversed(LAYERS)])
        for layer in reversed(LAYERS):
            at.bring_back(layer)
            at.assert_back(layer)
    pages = [PAGE * i for i in range(9)]
    backward = [*pages[6:], *pages[3:6], *pages[:3]]
    assert at.store.calls == [*(("write", page) for page in pages), *(("read", page) for page in backward)]


def test_what_comes_back_is_read_ahead_as_far_as_there_are_windows() -> None:
    """All of the first one, and a block of the second, before anybody takes any of it."""
    with desk(num_windows=4) as at:
        for layer in LAYERS:
            at.send(layer)
            at.let_go(layer)
        at.file.expect([at.away[layer] for layer in reversed(LAYERS)])
        at.store.await_call("read", 3 * PAGE)
        assert at.away[3].num_back == 0
        for layer in reversed(LAYERS):
            at.bring_back(layer)
            at.assert_back(layer)


def test_the_next_forward_need_not_wait_for_the_disk() -> None:
    """As far as windows have room, the device's memory is free once all is in them."""
    with desk(num_windows=3) as at:
        at.store.held.add("write")
        at.send(1)
        at.let_go(1)
        assert at.away[1].num_written == 0
        at.send(2)
        assert at.away[2].last_out is None


def test_nothing_is_read_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the writes go on only when somebody waits for it."""
    with desk(num_windows=6) as at:
        at.store.held.add("write")
        at.send(1)
        at.let_go(1)
        wait_for = at.file._transfers.wait_for

        def releasing(*arguments: Any) -> Any:
            at.store.release("write")
            return wait_for(*arguments)

        monkeypatch.setattr(at.file._transfers, "wait_for", releasing)
        at.file.expect([at.away[1]])
        at.bring_back(1)
        at.assert_back(1)
    assert [kind for kind, _ in at.store.calls] == ["write"] * 3 + ["read"] * 3


def test_on_the_clock_the_disk_is_waited_for_beyond_that() -> None:
    """A second for each operation: of the rest of a layer before all of it has left, of the windows behind it."""
    with desk(num_windows=2) as at:
        at.send(1)
        at.send(2)
        at.let_go(1)
        at.let_go(2)
        at.file.expect([at.away[2], at.away[1]])
        at.bring_back(2)
        at.bring_back(1)
    moved = [(r.stage, r.op.layer, r.op.num_bytes, r.end_s) for r in at.device.timeline.records]
    room, rest = 2 * PAGE, SIZE - 2 * PAGE
    assert moved == [
        (Stage.D2H, 1, SIZE, 1.0),
        (Stage.D2H, 2, SIZE, 2.0),
        (Stage.DISK, 1, rest, 2.0),
        (Stage.DISK, 1, room, 3.0),
        (Stage.DISK, 2, rest, 4.0),
        (Stage.DISK, 2, room, 5.0),
        (Stage.DISK, 2, room, 6.0),
        (Stage.DISK, 2, rest, 7.0),
        (Stage.H2D, 2, SIZE, 8.0),
        (Stage.DISK, 1, room, 8.0),
        (Stage.DISK, 1, rest, 9.0),
        (Stage.H2D, 1, SIZE, 10.0),
    ]


def test_what_is_back_is_the_tensors_alone_and_windows_are_poisoned() -> None:
    with desk(2) as at:
        at.send(1)
        at.let_go(1)
        at.file.expect([at.away[1]])
        at.bring_back(1)
        deadline_s = time.monotonic() + WAIT_S
        while at.file._free.qsize() < 2:  # the last copy has ended
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
    storage = at.tensors[1].untyped_storage()
    assert torch._C._storage_Use_Count(storage._cdata) == 2, "the tensor and what asks"
    assert all(bool((window == 0xFF).all()) for window in at.file._buffers)


def test_a_disk_that_does_not_get_on_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_activations, "transfer_deadline_s", lambda num_bytes: 0.05)
    with desk(num_windows=2) as at:
        at.store.held.add("write")
        at.send(1)
        with pytest.raises(
            DeadlineError, match="waited 0 s for boundary activations of layer 1 to be written: spill in"
        ):
            at.let_go(1)


def test_whoever_waits_hears_that_it_was_closed() -> None:
    with desk(num_windows=2) as at:
        at.store.held.add("write")
        at.send(1)
        at.store.await_call("write", 0)
        at.store.release("write")
        at.file.close()
        with pytest.raises(MegatrainError, match="spill in memory is not used any more"):
            at.away[1].file.wait(lambda: None, "d2h", "nothing")


class Damaged(Watched):
    """A store in which a block that is read has another bit than was written."""

    async def reach(self, kind: str, offset: int) -> None:
        await super().reach(kind, offset)
        if kind == "read" and offset == PAGE:
            self.content[offset + 17] ^= 1


def failing(kind: str, error: Exception) -> Callable[[int], Watched]:
    def make(num_bytes: int) -> Watched:
        store = Watched(num_bytes)
        store.failing[kind] = error
        return store

    return make


@pytest.mark.parametrize("boundaries", [Tier.HOST, Tier.HBM])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(Damaged, r"^spill in memory: bytes 4096 to 8192 are not what was written there", id="damaged"),
        pytest.param(failing("write", DiskFullError("cannot write: full")), r"^cannot write: full$", id="full"),
        pytest.param(failing("read", UnreadableError("cannot read: bad")), r"^cannot read: bad$", id="unreadable"),
    ],
)
def test_what_a_disk_does_ends_the_step_with_one_message(
    tmp_path: Path, boundaries: Tier, make: Callable[[int], Watched], message: str
) -> None:
    folder = build_tiny(tmp_path)
    mode = Mode(boundaries=boundaries, kept=Tier.HOST, to_disk=frozenset(range(5)))
    with pytest.raises(MegatrainError, match=message):
        train_engine(folder, tiny_batches(2), Recipe(2), mode, disk=lambda num_bytes: (make(num_bytes), BLOB))
