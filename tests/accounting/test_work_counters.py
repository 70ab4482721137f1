"""What a step did, from the counters that all processes of a host write into shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatrain_ray.accounting.work_counters import WorkColumns, WorkCounters
from megatrain_ray.io.storage.measured_store import DiskMeter, Moved, Time


@pytest.fixture
def counters() -> WorkCounters:
    return WorkCounters(memoryview(bytearray(WorkCounters.num_bytes(2, 2))), 2, 2)


def update(counters: WorkCounters, shard: int, seconds: float) -> None:
    counters.shards[shard]["updates"] += 1
    counters.shards[shard]["update_s"] += seconds


def test_an_update_takes_what_the_slowest_shard_takes(counters: WorkCounters) -> None:
    work = WorkColumns(counters, 0, None, uses_disk=False)
    assert work.columns(Time(0.0, 1.0)) == {}
    update(counters, 0, 0.5)
    update(counters, 1, 0.75)
    assert work.columns(Time(1.0, 2.0)) == {"update_s": 0.75}
    update(counters, 1, 0.25)
    update(counters, 1, 0.5)
    assert work.columns(Time(2.0, 3.0)) == {"update_s": 0.375}, "the mean of those that were made"
    update(counters, 0, 3.0)
    assert WorkColumns(counters, 0, None, uses_disk=False).columns(Time(3.0, 4.0)) == {}


def moving(row: Any, kind: str, *bytes_moved: Moved) -> None:
    meter = DiskMeter(row[kind])
    for moved in bytes_moved:
        with meter.transfer(moved):
            pass


def test_what_all_processes_move_is_added_up_and_evaluations_are_left_out(counters: WorkCounters) -> None:
    first, second = counters.gpus
    work = WorkColumns(counters, 0, None, uses_disk=True)
    moving(counters.shards[0], "disk", Moved(1, 2))
    for gpu in (first, second):
        moving(gpu, "weights", Moved(10, 0))
        moving(gpu, "activations", Moved(100, 200), Moved(0, 1000))
    counters.shards["spill_bytes"] = 3, 4
    second["spill_bytes"] = 5
    columns = work.columns(Time(0.0, 1.0))
    assert columns["disk_bytes"] == {
        "shards_read": 1, "shards_written": 2, "weights_read": 20, "activations_read": 200, "activations_written": 2400,
    }  # fmt: skip
    assert columns["spill_bytes"] == 12
    moving(counters.shards[1], "disk", Moved(5, 6))
    moving(first, "weights", Moved(10, 0))
    work.leave_out_evaluation()
    moving(first, "weights", Moved(7, 0))
    assert work.columns(Time(1.0, 2.0))["disk_bytes"] == {
        "shards_read": 5, "shards_written": 6, "weights_read": 7, "activations_read": 0, "activations_written": 0,
    }  # fmt: skip


def test_the_disk_is_at_work_while_any_process_moves_something(counters: WorkCounters) -> None:
    """What two of them do at once counts once, and what is done before or after the step not at all."""
    counters.shards[0]["disk"]["busy"][:2] = (2.5, 4.0), (9.0, np.inf)
    counters.gpus[0]["weights"]["busy"][:2] = (1.5, 2.25), (3.5, 5.0)
    counters.gpus[1]["activations"]["busy"][:2] = (7.5, 8.5), (8.0, 8.25)
    counters.shards[1]["disk"]["busy"][0] = 9.5, 4.0  # is being written: its end is that of an earlier time
    work = WorkColumns(counters, 0, None, uses_disk=True)
    for step, expected in (
        (Time(0.0, 10.0), 0.75 + 2.5 + 1.0 + 1.0),
        (Time(2.0, 8.0), 0.25 + 2.5 + 0.5),
        (Time(5.0, 7.0), 0.0),
        (Time(11.0, 12.0), 1.0),
    ):
        assert work.columns(step)["disk_s"] == pytest.approx(expected)


def test_a_replacement_goes_on_counting(counters: WorkCounters) -> None:
    going_on = DiskMeter(counters.shards[0]["disk"]).transfer(Moved(5, 0))
    going_on.__enter__()  # and its process is killed
    moving(counters.shards[0], "disk", Moved(3, 0))
    assert DiskMeter(counters.shards[0]["disk"]).moved == (3, 0)
    assert not np.isinf(counters.shards["disk"]["busy"]).any()
