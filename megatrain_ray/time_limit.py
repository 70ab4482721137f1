"""Bounds the time of work that text from outside decides, such as a regular expression or a chat template."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 1.0  # after which the error is raised once more, if a library has caught it


class OutOfTimeError(Exception):
    """Reports that the block of `time_limit` took longer than it may."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block if it takes longer than this. Blocks may be nested.

    A signal of the main thread interrupts Python code and regular expressions. In other threads nothing is bounded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    is_over = False

    def end(number: int, frame: FrameType | None) -> None:
        if not is_over:
            raise OutOfTimeError

    handler, start_s = signal.signal(signal.SIGALRM, end), time.monotonic()
    before_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        try:
            yield
        finally:
            is_over = True
    finally:  # also if the signal came between the end of the block and the line above
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if before_s:  # of somebody else, such as an outer block
            signal.setitimer(signal.ITIMER_REAL, max(before_s - (time.monotonic() - start_s), 1e-3), interval_s)
