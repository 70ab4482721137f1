"""Computes the share of the traced steps in which the compute stage worked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megatrain_ray.accounting.trace_file import Event
from megatrain_ray.spans import Row


class _Interval(NamedTuple):
    """Describes an interval of time in microseconds."""

    start: float
    stop: float


def busy_share(events: Iterable[Event]) -> float:
    """Return the share of the traced time in which the compute stage worked, 0 to 1.

    The traced time runs from the start of the first traced step to the end of the last one. The stage works while a
    span of its row is open that is not a wait. On a GPU the gaps between the kernels of one span count as work.

    events: what `read_trace` returns.

    Raises ValueError if the events hold no step.
    """
    found = list(events)
    steps = [_interval(event) for event in _of(found, Row.STEPS) if event["name"].startswith("step ")]
    if not steps:
        raise ValueError("the trace holds no step")
    window = _Interval(min(step.start for step in steps), max(step.stop for step in steps))
    compute = list(_of(found, Row.COMPUTE))
    inside = [(event["cat"] == "wait", _cut(_interval(event), window)) for event in compute]
    waiting = _length(interval for waits, interval in inside if waits)
    # A wait may lie inside the work span that needs its result, so its time is subtracted from the work.
    return (_length(interval for _, interval in inside) - waiting) / (window.stop - window.start)


def _of(events: Iterable[Event], row: Row) -> Iterator[Event]:
    """Return the spans of `row` in all processes: the row has the same thread name in each of them."""
    events = list(events)
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == row.value}
    return (event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) in threads)


def _interval(event: Event) -> _Interval:
    return _Interval(event["ts"], event["ts"] + event["dur"])


def _cut(interval: _Interval, window: _Interval) -> _Interval:
    start = min(max(interval.start, window.start), window.stop)
    return _Interval(start, max(start, min(interval.stop, window.stop)))


def _length(intervals: Iterable[_Interval]) -> float:
    """Return the length of the union of the intervals, in microseconds."""
    total, reached = 0.0, -1.0
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
