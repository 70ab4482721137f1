"""history.jsonl: starts, deaths and ends of a run, as they were. Of processes that are killed: test_kills.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import pytest

from megatrain_ray.errors import InterruptedRunError, MegatrainError
from megatrain_ray.metrics.sink import Count, DeathRecorder, End, MetricSink, MetricSinks, kind_of
from megatrain_ray.run.run_history import History, newest_start, read_history


class Counter(MetricSink):
    """A sink that keeps what is counted."""

    def __init__(self) -> None:
        self.counted: list[tuple[Count, str]] = []

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        pass

    def count(self, what: Count, kind: str) -> None:
        self.counted.append((what, kind))

    def keep(self) -> None:
        pass

    def close(self, end: End) -> None:
        pass


def history(folder: Path) -> History:
    seconds = count(100)
    return History(folder, lambda: next(seconds))


def test_a_start_and_its_end(tmp_path: Path) -> None:
    with history(tmp_path).of_start(3, 10, "abc", versions={"torch": "2"}):
        pass
    assert read_history(tmp_path) == [
        {
            "what": "start", "unix_s": 100, "step": 3, "steps": 10, "plan_sha256": "abc", "pid": os.getpid(),
            "versions": {"torch": "2"},
        },
        {"what": "end", "unix_s": 101, "how": "finished", "reason": None},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "how", "reason"),
    [
        (MegatrainError("a process died"), "failed", "a process died"),
        (ValueError(), "failed", "ValueError"),
        (InterruptedRunError("saved at step 3"), "interrupted", "saved at step 3"),
        (KeyboardInterrupt(), "interrupted", None),
    ],
)
def test_an_end_by_an_error_says_how(tmp_path: Path, error: BaseException, how: str, reason: str | None) -> None:
    with pytest.raises(type(error)), history(tmp_path).of_start(0, 10, "abc"):
        raise error
    end = read_history(tmp_path)[-1]
    assert (end["how"], end["reason"]) == (how, reason)


def test_deaths_are_written_down_and_counted_by_kind(tmp_path: Path) -> None:
    counter = Counter()
    faults = DeathRecorder(history(tmp_path), MetricSinks({"counter": counter}), lambda: 7)
    faults.died("optimizer shard 12")
    faults.replaced("optimizer shard 12", 1.5)
    faults.died("GPU worker")
    assert read_history(tmp_path) == [
        {"what": "died", "unix_s": 100, "process": "optimizer shard 12", "step": 7},
        {"what": "replaced", "unix_s": 101, "process": "optimizer shard 12", "step": 7, "took_s": 1.5},
        {"what": "died", "unix_s": 102, "process": "GPU worker", "step": 7},
    ]
    assert counter.counted == [
        (Count.DEATHS, "optimizer shard"),
        (Count.REPLACEMENTS, "optimizer shard"),
        (Count.DEATHS, "GPU worker"),
    ]
    assert [kind_of(name) for name in ("arena owner", "one of Ray's")] == ["arena owner", "one of Ray's"]
    assert [kind_of(name) for name in ("arena owner of host 1", "GPU worker 3")] == ["arena owner", "GPU worker"]


def test_the_newest_start_is_what_came_last(tmp_path: Path) -> None:
    told = history(tmp_path)
    with told.of_start(0, 10, "abc"):
        told.died("data", 1)
    with told.of_start(4, 10, "abc"):
        told.died("arena owner", 5)
    assert [row["what"] for row in newest_start(read_history(tmp_path))] == ["start", "died", "end"]
    assert newest_start([]) == ()


def test_a_torn_line_is_no_row_and_a_missing_file_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path) == ()
    with history(tmp_path).of_start(0, 10, "abc"):
        pass
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('[1]\n{"what": "nothing known", "unix_s": 1}\n{"what": "end", "un')
    assert len(read_history(tmp_path)) == 2


def test_a_history_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    with history(tmp_path / "missing").of_start(0, 10, "abc"):
        pass
    assert read_history(tmp_path / "missing") == ()
