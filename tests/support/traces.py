"""Checks what must hold of every trace: the rules of Chrome's Trace Event Format, as far as our events go."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from megatrain_ray.accounting.trace_file import Event

Thread = tuple[str, str]  # names of process and thread


def check_format(events: Iterable[Event]) -> dict[Thread, list[Event]]:
    """Return the spans of each thread, by its name, after checking that Perfetto drops and misplaces none.

    It would do so with a negative time, an event before an earlier one of its thread, one that neither nests in another
    nor lies beside it, or a thread with no name.
    """
    named: dict[tuple[str, int, int], str] = {}
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in json.loads(json.dumps(list(events), allow_nan=False)):
        assert {"ph", "name", "pid", "tid", "args"} <= event.keys()
        if event["ph"] == "M":
            named[event["name"], event["pid"], event["tid"]] = event["args"].get("name", "")
        else:
            assert event["ph"] == "X"
            threads[event["pid"], event["tid"]].append(event)
    for spans in threads.values():
        check_order(spans)
    names = {(named["process_name", pid, 0], named["thread_name", pid, tid]): s for (pid, tid), s in threads.items()}
    assert len(names) == len(threads), "two threads of one name"
    return names


def check_order(spans: Iterable[Event]) -> None:
    open_ends: list[int] = []
    last = 0
    for span in spans:
        start, end = begin(span), finish(span)
        assert last <= start <= end, f"{span} goes back in time"
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"{span} overlaps the one before it"
        open_ends.append(end)
        last = start


def begin(span: Mapping[str, Any]) -> int:
    """Return the start of a span in ns, as Perfetto keeps it."""
    return round(1000 * span["ts"])


def finish(span: Mapping[str, Any]) -> int:
    return begin(span) + round(1000 * span["dur"])
