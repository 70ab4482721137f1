"""Writes traces as JSON files that Perfetto and chrome://tracing open, reads them, and sums up what they show.

The format is Chrome's "Trace Event Format": complete events (ph X) with times in microseconds, on threads (tid) of
processes (pid) that metadata events (ph M) name. Two events of a thread must be nested or disjoint. Spans of one row
that overlap in another way are put on additional threads.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatrain_ray.io.files.atomic_file import temporary_file
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.storage.measured_store import BusyInterval, busy_s
from megatrain_ray.read_file import parse_json, regular_file
from megatrain_ray.spans import RecordedSpans, Row, Span

LARGE_SPANS = 50_000  # 10 MB of JSON; a trace with more spans is compressed, to about a tenth
LANES = 1000  # thread ids reserved for each row

Event = Mapping[str, Any]


class TracedProcess(NamedTuple):
    name: str
    recorded: RecordedSpans


def trace_path(run_dir: Path, first: int, last: int) -> Path:
    return run_dir / f"trace_steps_{first}_{last}.json"


def find_traces(run_dir: Path) -> list[Path]:
    return sorted(path for path in run_dir.glob("trace_steps_*") if path.suffix in (".json", ".gz"))


def write_trace(path: Path, processes: Sequence[TracedProcess], layer_names: Sequence[str]) -> Path:
    """Write a trace, whole or not at all, and return its path: `path`, with .gz appended if the trace is large.

    layer_names: names of layers by number, for spans that hold the number.

    Raises MegatrainError if the file cannot be written.
    """
    num_spans = sum(len(process.recorded.spans) for process in processes)
    target = path.with_name(path.name + ".gz") if num_spans > LARGE_SPANS else path
    with explained("write", target), temporary_file(target) as temporary:
        with _open(temporary, "wt", compressed=target.suffix == ".gz") as file:
            file.writelines(_lines(events(processes, layer_names), processes))
        temporary.replace(target)
    return target


def read_trace(path: Path) -> list[Event]:
    """Return the events of a file that `write_trace` wrote. Raises MegatrainError if it cannot be read."""
    with explained("read", path), _open(regular_file(path), "rt", compressed=path.suffix == ".gz") as file:
        found: list[Event] = parse_json(file.read())["traceEvents"]
    return found


def _open(path: Path, mode: str, *, compressed: bool) -> Any:
    return gzip.open(path, mode, 1, encoding="utf-8") if compressed else path.open(mode, encoding="utf-8")


def _lines(found: Iterable[Event], processes: Sequence[TracedProcess]) -> Iterator[str]:
    """Yield the lines of the JSON file, with one event on each."""
    dropped = {process.name: process.recorded.num_dropped for process in processes if process.recorded.num_dropped}
    yield f'{{"displayTimeUnit": "ms", "otherData": {{"spans_dropped": {json.dumps(dropped)}}}, "traceEvents": [\n'
    for number, event in enumerate(found):
        yield (",\n" if number else "") + json.dumps(event)
    yield "\n]}\n"


def events(processes: Sequence[TracedProcess], layer_names: Sequence[str]) -> Iterator[Event]:
    """Yield the events of the trace in Chrome's format. Time 0 is the start of the first step.

    Spans that ended before time 0 are left out; spans that were open then are cut to begin there. The events of a
    thread are in the order of their start.
    """
    everything = [span for process in processes for span in process.recorded.spans]
    origin_ns = min((span.start_ns for span in everything if span.row is Row.STEPS), default=0)
    for order, (name, recorded) in enumerate(processes):
        yield _name("process", recorded.pid, 0, name)
        yield {"ph": "M", "name": "process_sort_index", "pid": recorded.pid, "tid": 0, "args": {"sort_index": order}}
        for number, row in enumerate(Row):
            of_row = [span for span in recorded.spans if span.row is row and span.end_ns > origin_ns]
            for lane, spans in enumerate(lanes(of_row)):
                tid = LANES * number + lane
                yield _name("thread", recorded.pid, tid, row.value if lane == 0 else f"{row.value} {lane + 1}")
                sort = {"sort_index": tid}
                yield {"ph": "M", "name": "thread_sort_index", "pid": recorded.pid, "tid": tid, "args": sort}
                for span in spans:
                    yield {"pid": recorded.pid, "tid": tid, **_event(span, origin_ns, layer_names)}


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute the spans over lists in which any two spans are nested or disjoint; each list is in order of start.

    A span goes into the first list that can take it, and a list is added only if none can.
    """
    placed: list[list[Span]] = []
    stacks: list[list[int]] = []  # end times of the open spans of each lane, the innermost last
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        for stack in stacks:
            while stack and stack[-1] <= span.start_ns:
                stack.pop()
        lane = next((i for i, stack in enumerate(stacks) if not stack or span.end_ns <= stack[-1]), len(stacks))
        if lane == len(stacks):
            placed.append([])
            stacks.append([])
        placed[lane].append(span)
        stacks[lane].append(span.end_ns)
    return placed


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _event(span: Span, origin_ns: int, layer_names: Sequence[str]) -> Event:
    start_ns = max(span.start_ns, origin_ns)
    args: dict[str, Any] = {}
    if span.layer != -1:
        args["layer"] = layer_names[span.layer] if isinstance(span.layer, int) else span.layer
    if span.micro_batch >= 0:
        args["micro_batch"] = span.micro_batch
    if span.num_bytes:
        args |= {"bytes": span.num_bytes, "GB/s": round(span.num_bytes / max(1, span.end_ns - span.start_ns), 3)}
    kind = "wait" if span.waits else "work"
    times = {"ts": (start_ns - origin_ns) / 1000, "dur": (span.end_ns - start_ns) / 1000}
    return {"ph": "X", "name": span.name, "cat": kind, **times, "args": args}


def busy_share(events: Iterable[Event]) -> float:
    """Return the share of the traced steps' time in which the compute stage worked, 0 to 1.

    The stage works while a span of its row is open that is not a wait. On a GPU the gaps between the kernels of one
    span count as work. `events` are what `read_trace` returns. Raises ValueError if they hold no step.
    """
    found = list(events)
    steps = _times(event for event in _of_row(found, Row.STEPS) if event["name"].startswith("step "))
    if not steps.size:
        raise ValueError("the trace holds no step")
    window = BusyInterval(steps.min(), steps.max())
    compute = _of_row(found, Row.COMPUTE)
    waits_s = busy_s(_times(event for event in compute if event["cat"] == "wait"), window)
    # A wait may lie inside the work span that needs its result, so its time is subtracted from the work.
    return (busy_s(_times(compute), window) - waits_s) / (window.end_s - window.start_s)


def _of_row(events: Sequence[Event], row: Row) -> list[Event]:
    """Return the spans of `row` in all processes: the row has the same thread name in each of them."""
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == row.value}
    return [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) in threads]


def _times(events: Iterable[Event]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return start and end of each event, [events, 2], in microseconds."""
    return np.array([(event["ts"], event["ts"] + event["dur"]) for event in events], float).reshape(-1, 2)
