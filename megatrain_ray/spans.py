"""Records spans of real time: what a process does in the traced steps of a training.

All times are of CLOCK_MONOTONIC, which is one clock for all processes of a machine. The virtual clock of
virtual_clock.py is another thing: it counts costs, and tests read the order of a step from it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import NamedTuple

# Of a process: about 60 MB. A step of 30 layers in 4 micro-batches makes about 1,500 spans in the GPU worker.
MAX_SPANS = 200_000


def traced_steps(trace: tuple[int, int] | None) -> range:
    """Return the steps that log.trace names."""
    return range(trace[0], trace[1] + 1) if trace else range(0)


def traced_updates(steps: range) -> range:
    """Return the updates that run during these steps. The update before the first step runs under its forward."""
    return range(steps.start - 1, steps.stop) if steps else steps


class Row(Enum):
    """Names the rows of a trace, from top to bottom within a process."""

    STEPS = "steps"
    COMPUTE = "compute"
    SUBMIT = "compute thread"
    H2D = "h2d"
    D2H = "d2h"
    ALL_GATHER = "all-gather"
    UPLOADS = "event loop: uploads"
    GRADIENTS = "event loop: gradients"
    LANDINGS = "event loop: landings"
    UPDATES = "updates"
    DISK = "disk"
    SAVE = "save"
    BATCHES = "batches"
    DRIVER = "driver"


class Span(NamedTuple):
    """Records what a process did in one row of the trace, and when.

    layer: its number or name; -1: none.
    waits: the process does nothing meanwhile.
    """

    row: Row
    name: str
    start_ns: int
    end_ns: int
    layer: int | str = -1
    micro_batch: int = -1
    num_bytes: int = 0
    waits: bool = False


class RecordedSpans(NamedTuple):
    """Holds the spans of a process.

    num_dropped: spans that came when there were MAX_SPANS already.
    """

    pid: int
    spans: tuple[Span, ...]
    num_dropped: int


_NOTHING = nullcontext()


class SpanLog:
    """Collects the spans of one process. Thread-safe.

    on: whether spans are recorded; set by whoever knows which steps are traced.
    num_dropped: spans for which there was no room.
    """

    def __init__(self) -> None:
        self.on = False
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.num_dropped = 0

    def span(
        self, row: Row, name: str, layer: int | str = -1, micro_batch: int = -1, num_bytes: int = 0, *,
        waits: bool = False,
    ) -> AbstractContextManager[None]:  # fmt: skip
        """Record the time of the block, if it begins while the log is on."""
        if not self.on:
            return _NOTHING
        return self._timed(Span(row, name, 0, 0, layer, micro_batch, num_bytes, waits))

    @contextmanager
    def _timed(self, span: Span) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(span._replace(start_ns=start_ns, end_ns=time.monotonic_ns()))

    def add(self, span: Span) -> None:
        """Record a span whose times are known."""
        with self._lock:
            if len(self._spans) < MAX_SPANS:
                self._spans.append(span)
            else:
                self.num_dropped += 1

    def take(self) -> RecordedSpans:
        """Return what was recorded since the last call."""
        with self._lock:
            taken = RecordedSpans(os.getpid(), tuple(self._spans), self.num_dropped)
            self._spans, self.num_dropped = [], 0
            return taken
