"""Computes the share of the traced steps in which the compute stage worked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from megatrain_ray.accounting.trace_file import Event
from megatrain_ray.io.storage.measured_store import BusyInterval, busy_s
from megatrain_ray.spans import Row


def busy_share(events: Iterable[Event]) -> float:
    """Return the share of the traced time in which the compute stage worked, 0 to 1.

    The traced time runs from the start of the first traced step to the end of the last one. The stage works while a
    span of its row is open that is not a wait. On a GPU the gaps between the kernels of one span count as work.

    events: what `read_trace` returns.

    Raises ValueError if the events hold no step.
    """
    found = list(events)
    steps = _times(event for event in _of(found, Row.STEPS) if event["name"].startswith("step "))
    if not steps.size:
        raise ValueError("the trace holds no step")
    window = BusyInterval(steps.min(), steps.max())
    compute = list(_of(found, Row.COMPUTE))
    waits_s = busy_s(_times(event for event in compute if event["cat"] == "wait"), window)
    # A wait may lie inside the work span that needs its result, so its time is subtracted from the work.
    return (busy_s(_times(compute), window) - waits_s) / (window.end_s - window.start_s)


def _of(events: Iterable[Event], row: Row) -> Iterator[Event]:
    """Return the spans of `row` in all processes: the row has the same thread name in each of them."""
    events = list(events)
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == row.value}
    return (event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) in threads)


def _times(events: Iterable[Event]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return start and end of each event, [events, 2], in microseconds."""
    return np.array([(event["ts"], event["ts"] + event["dur"]) for event in events], float).reshape(-1, 2)
