"""The file of a trace, and what is reckoned from it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_ray.accounting.trace_file import (
    TracedProcess,
    busy_share,
    events,
    find_traces,
    lanes,
    read_trace,
    trace_path,
    write_trace,
)
from megatrain_ray.errors import MegatrainError
from megatrain_ray.spans import RecordedSpans, Row, Span
from tests.support.traces import check_format, check_order

NAMES = ["embed", "layers.0", "layers.1", "head"]


def process(name: str, pid: int, *spans: Span) -> TracedProcess:
    return TracedProcess(name, RecordedSpans(pid, spans, 0))


GPU = process(
    "GPU worker", 10,
    Span(Row.STEPS, "step 5", 1_000_000, 3_000_000),
    Span(Row.COMPUTE, "forward", 1_100_000, 1_500_000, 1, 0),
    Span(Row.COMPUTE, "wait h2d", 1_500_000, 1_750_000, waits=True),
    Span(Row.H2D, "load", 1_200_000, 1_202_000, 2, num_bytes=4096),
)  # fmt: skip
SHARD = process(
    "optimizer shard 0", 11,
    Span(Row.UPDATES, "update", 100_000, 900_000, 0),
    Span(Row.UPDATES, "wait gradient", 900_000, 1_250_000, 1, waits=True),
    Span(Row.SAVE, "write m", 1_300_000, 1_400_000, "layers.0", num_bytes=8),
    Span(Row.SAVE, "write v", 1_350_000, 1_450_000, "layers.0", num_bytes=8),
)  # fmt: skip


def test_events_are_those_of_the_spans_from_the_first_step_on() -> None:
    rows = check_format(events([GPU, SHARD], NAMES))
    piece = {"layer": "layers.0", "bytes": 8, "GB/s": 0.0}
    told = {
        row: [tuple(e[k] for k in ("name", "ts", "dur", "cat", "args")) for e in found] for row, found in rows.items()
    }
    assert told == {
        ("GPU worker", "steps"): [("step 5", 0.0, 2000.0, "work", {})],
        ("GPU worker", "compute"): [
            ("forward", 100.0, 400.0, "work", {"layer": "layers.0", "micro_batch": 0}),
            ("wait h2d", 500.0, 250.0, "wait", {}),
        ],
        ("GPU worker", "h2d"): [("load", 200.0, 2.0, "work", {"layer": "layers.1", "bytes": 4096, "GB/s": 2.048})],
        ("optimizer shard 0", "updates"): [("wait gradient", 0.0, 250.0, "wait", {"layer": "layers.0"})],
        ("optimizer shard 0", "save"): [("write m", 300.0, 100.0, "work", piece)],
        ("optimizer shard 0", "save 2"): [("write v", 350.0, 100.0, "work", piece)],
    }  # fmt: skip


def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trace_path(tmp_path, 5, 8)
    assert write_trace(path, [GPU, SHARD], NAMES) == path
    assert read_trace(path) == list(events([GPU, SHARD], NAMES))
    monkeypatch.setattr("megatrain_ray.accounting.trace_file.LARGE_SPANS", 3)
    large = write_trace(path, [GPU, SHARD], NAMES)
    assert large.name == "trace_steps_5_8.json.gz"
    assert gzip.decompress(large.read_bytes()) == path.read_bytes()
    assert read_trace(large) == read_trace(path)
    assert find_traces(tmp_path) == [path, large]


def test_a_trace_is_whole_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        write_trace(trace_path(tmp_path, 5, 8), [GPU], NAMES[:1])
    assert find_traces(tmp_path) == []
    with pytest.raises(MegatrainError, match="cannot write"):
        write_trace(trace_path(tmp_path / "gone", 5, 8), [GPU], NAMES)


TIMES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=30)


@given(TIMES)
def test_lanes_hold_every_span_once_and_in_each_they_nest(times: list[tuple[int, int]]) -> None:
    spans = [Span(Row.SAVE, str(i), start, start + length) for i, (start, length) in enumerate(times)]
    placed = lanes(spans)
    assert sorted(span for lane in placed for span in lane) == sorted(spans)
    for lane in placed:
        check_order([{"ts": span.start_ns / 1000, "dur": (span.end_ns - span.start_ns) / 1000} for span in lane])


def test_spans_that_nest_stay_in_one_row() -> None:
    spans = [Span(Row.STEPS, "step", 0, 10), Span(Row.STEPS, "wait", 0, 4), Span(Row.STEPS, "commit", 4, 10)]
    assert lanes(reversed(spans)) == [spans]


def test_busy_share_is_work_without_waits_in_the_time_of_the_steps() -> None:
    """Work without waits takes 2.0 of the 4 µs of the steps.

    Counted are [0.5, 1] of a span that began before the steps, and [1, 3] with a wait of 0.5 in it. Overlaps count
    once, and a wait outside of work does not count.
    """
    spans = [
        Span(Row.STEPS, "step 1", 500, 2500),
        Span(Row.STEPS, "wait data", 500, 2500, waits=True),
        Span(Row.STEPS, "step 2", 2600, 4500),
        Span(Row.COMPUTE, "forward", 0, 1000),
        Span(Row.COMPUTE, "accumulate", 1000, 3000),
        Span(Row.COMPUTE, "wait d2h", 1200, 1700, waits=True),
        Span(Row.COMPUTE, "backward", 2500, 3000),
        Span(Row.COMPUTE, "wait loss", 3500, 4000, waits=True),
        Span(Row.COMPUTE, "forward", 4600, 9000),
        Span(Row.H2D, "load", 0, 4500),
    ]
    assert busy_share(events([process("GPU worker", 1, *spans)], NAMES)) == pytest.approx((0.5 + 1.5) / 4)
    with pytest.raises(ValueError, match="no step"):
        busy_share([])
