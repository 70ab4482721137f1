"""What a step moved and how long the disk was at it, from what all processes had done at two times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatrain_ray.accounting.gpu_work import GpuDisk, GpuWork
from megatrain_ray.accounting.shard_work import ShardWork
from megatrain_ray.accounting.work_counters import RunWork, work_between
from megatrain_ray.io.storage.measured_store import Busy, Moved, Time


def busy(*times: tuple[float, float], since_s: float = 0.0) -> Busy:
    return Busy(tuple(Time(*time) for time in times), since_s)


def steps(*ends: float) -> tuple[Time, ...]:
    """Return the times of steps that follow each other, the first from 0 on."""
    return tuple(Time(start_s, end_s) for start_s, end_s in zip((0.0, *ends), ends, strict=False))


BEFORE = RunWork(
    [ShardWork(1, 2, 1.0, Moved(60, 40)), ShardWork(2, 3, 1.0)],
    [GpuWork(2, Moved(7, 0), Moved(10, 10), (), steps(1, 2))],
)
AFTER = RunWork(
    [ShardWork(1, 6, 3.0, Moved(300, 200), busy((2.5, 4.0)), 9), ShardWork(2, 5, 2.2, Moved(40, 20), busy(), 5)],
    [GpuWork(4, Moved(27, 0), Moved(16, 20), (busy((1.5, 2.5), (3.5, 5.0)), busy((7.5, 9.0))), steps(1, 2, 5, 8), 3)],
)


def test_a_steps_work_is_the_mean_of_each_processs_steps() -> None:
    work = work_between(BEFORE, AFTER)
    assert work is not None
    assert work.update_s == pytest.approx(0.6)
    assert (work.weight_bytes, work.activation_bytes) == (10.0, 8.0)
    assert work.disk_bytes == 100.0 + 30.0 + 10.0 + 8.0
    assert work.spill_bytes == 9 + 5 + 3


def test_the_disk_is_at_work_while_any_process_moves_something() -> None:
    """What two of them do at once counts once, and what is done outside of the steps between not at all."""
    work = work_between(BEFORE, AFTER)
    assert work is not None
    assert work.disk_s == pytest.approx((3.0 + 0.5) / 2)


def test_what_all_gpus_move_is_added_up() -> None:
    """Each over the steps that it has made when it is asked, which may be one more or less."""
    second = GpuWork(1, Moved(1, 0), Moved(2, 3)), GpuWork(5, Moved(21, 0), Moved(42, 43), (busy((6.0, 7.0)),), (), 2)
    both = (replace(work, gpus=[*work.gpus, more]) for work, more in zip((BEFORE, AFTER), second, strict=True))
    work = work_between(*both)
    assert work is not None
    assert (work.weight_bytes, work.activation_bytes) == (10.0 + 5.0, 8.0 + 20.0)
    assert work.disk_bytes == 100.0 + 30.0 + 15.0 + 28.0
    assert work.spill_bytes == 9 + 5 + 3 + 2
    assert work.disk_s == pytest.approx((3.0 + 0.5 + 1.0) / 2)


def known_from(since_s: float) -> float:
    """Seconds of a step where one shard does not know any more what it did before."""
    first, second = AFTER.shards
    work = work_between(BEFORE, replace(AFTER, shards=[first, replace(second, busy=busy(since_s=since_s))]))
    assert work is not None
    return work.disk_s


def test_where_a_process_forgot_times_the_rest_stands_for_all() -> None:
    assert known_from(2.0) == pytest.approx(3.5 / 2)
    assert known_from(5.0) == pytest.approx(0.5)
    assert known_from(4.0) == pytest.approx(3.0 * 1.5 / 4.0)
    assert known_from(9.0) == 0.0


def test_a_run_whose_shards_update_nothing_has_a_disk_all_the_same() -> None:
    """All layers live on the device, and activations wait on disk."""
    idle = [ShardWork(1, 0, 0.0)]
    work = work_between(replace(BEFORE, shards=idle), replace(AFTER, shards=idle))
    assert work is not None
    assert (work.update_s, work.disk_bytes, work.activation_bytes) == (0.0, 18.0, 8.0)
    assert work.disk_s == pytest.approx(2.5 / 2)


def without(shards: Sequence[ShardWork]) -> RunWork:
    return replace(AFTER, shards=shards)


def test_nobody_knows_where_somebody_was_replaced_or_has_done_nothing_since() -> None:
    first, second = AFTER.shards
    others = (BEFORE, without([first, replace(second, pid=3)]), without([first]), without([]), None)
    (gpu,) = AFTER.gpus
    for gpus in (BEFORE.gpus, [replace(gpu, pid=3)], [gpu, gpu]):
        assert work_between(BEFORE, replace(AFTER, gpus=gpus)) is None
    for after in others:
        assert work_between(BEFORE, after) is None
    assert work_between(None, AFTER) is None


def test_what_moves_between_steps_is_no_steps() -> None:
    disk = GpuDisk(None)
    for end in (1.0, 2.0):
        with disk.of_weights.transfer(Moved(read=1000)):
            pass  # an evaluation's
        disk.begin_step()
        with disk.of_weights.transfer(Moved(read=10)), disk.of_activations.transfer(Moved(3, 4)):
            pass
        disk.end_step(Time(end - 1, end))
    work = disk.work()
    assert (work.num_steps, work.weights, work.activations) == (2, (20, 0), (6, 8))
    assert work.steps == steps(1.0, 2.0)
    assert [len(each.times) for each in work.busy] == [4, 2]
    assert work.spill_bytes == 0
