"""What a step did, from the counters that all processes of a host write into shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatrain_ray.accounting.work_counters import WorkColumns, WorkCounters
from megatrain_ray.io.storage.measured_store import BusyInterval, DiskMeter, IoBytes


@pytest.fixture
def counters() -> WorkCounters:
    return WorkCounters(memoryview(bytearray(WorkCounters.num_bytes(2, 2))), 2, 2)


def update(counters: WorkCounters, shard: int, seconds: float) -> None:
    counters.shards[shard]["updates"] += 1
    counters.shards[shard]["update_s"] += seconds


def test_an_update_takes_what_the_slowest_shard_takes(counters: WorkCounters) -> None:
    work = WorkColumns(counters, 0, None, uses_disk=False)
    assert work.columns(1, BusyInterval(0.0, 1.0)) == {}
    update(counters, 0, 0.5)
    update(counters, 1, 0.75)
    assert work.columns(2, BusyInterval(1.0, 2.0)) == {"update_s": 0.75}
    update(counters, 1, 0.25)
    update(counters, 1, 0.5)
    assert work.columns(3, BusyInterval(2.0, 3.0)) == {"update_s": 0.375}, "the mean of those that were made"
    update(counters, 0, 3.0)
    assert WorkColumns(counters, 0, None, uses_disk=False).columns(4, BusyInterval(3.0, 4.0)) == {}


def moving(row: Any, kind: str, *bytes_moved: IoBytes) -> None:
    meter = DiskMeter(row[kind])
    for moved in bytes_moved:
        with meter.transfer(moved):
            pass


def test_what_all_processes_move_is_added_up_and_evaluations_are_left_out(counters: WorkCounters) -> None:
    """Of other GPU workers in the row after, since they end a step at their own time."""
    ranks = [WorkColumns(counters, rank, None, uses_disk=True) for rank in (0, 1)]
    moved = []
    for step in (1, 2, 3):
        moving(counters.shards[step % 2], "disk", IoBytes(step, 2 * step))
        for rank, gpu in enumerate(counters.gpus):
            moving(gpu, "weights", IoBytes(10 * step, 0))
            moving(gpu, "activations", IoBytes(100, 200 * rank), IoBytes(0, 1000))
        counters.shards["spill_bytes"] = 3, 4
        time = BusyInterval(step - 1.0, step)
        if step == 2:
            ranks[1].columns(step, time)  # the other one ends first
        row = ranks[0].columns(step, time)
        if step != 2:
            ranks[1].columns(step, time)
        moved.append(tuple(row["disk_bytes"].values()))
        assert row["spill_bytes"] == 7
        moving(counters.gpus[0], "weights", IoBytes(7777, 0))
        ranks[0].leave_out_evaluation()
    assert list(row["disk_bytes"]) == [
        "shards_read", "shards_written", "weights_read", "activations_read", "activations_written"
    ]  # fmt: skip
    assert moved == [(1, 2, 10, 100, 1000), (2, 4, 20 + 10, 200, 2200), (3, 6, 30 + 20, 200, 2200)]
    again = WorkColumns(counters, 0, None, uses_disk=True)  # takes the place of one that died
    moving(counters.gpus[0], "weights", IoBytes(5, 0))
    assert again.columns(4, BusyInterval(3.0, 4.0))["disk_bytes"]["weights_read"] == 5


def test_the_disk_is_at_work_while_any_process_moves_something(counters: WorkCounters) -> None:
    """What two of them do at once counts once, and what is done before or after the step not at all."""
    counters.shards[0]["disk"]["busy"][:2] = (2.5, 4.0), (9.0, np.inf)
    counters.gpus[0]["weights"]["busy"][:2] = (1.5, 2.25), (3.5, 5.0)
    counters.gpus[1]["activations"]["busy"][:2] = (7.5, 8.5), (8.0, 8.25)
    counters.shards[1]["disk"]["busy"][0] = 9.5, 4.0  # is being written: its end is that of an earlier time
    work = WorkColumns(counters, 0, None, uses_disk=True)
    for step, expected in (
        (BusyInterval(0.0, 10.0), 0.75 + 2.5 + 1.0 + 1.0),
        (BusyInterval(2.0, 8.0), 0.25 + 2.5 + 0.5),
        (BusyInterval(5.0, 7.0), 0.0),
        (BusyInterval(11.0, 12.0), 1.0),
    ):
        assert work.columns(1, step)["disk_s"] == pytest.approx(expected)


def test_a_replacement_goes_on_counting(counters: WorkCounters) -> None:
    going_on = DiskMeter(counters.shards[0]["disk"]).transfer(IoBytes(5, 0))
    going_on.__enter__()  # and its process is killed
    moving(counters.shards[0], "disk", IoBytes(3, 0))
    assert DiskMeter(counters.shards[0]["disk"]).moved == (3, 0)
    assert not np.isinf(counters.shards["disk"]["busy"]).any()
