"""Ctrl-C and SIGTERM: while a run trains the first asks it to save and end; any other ends it at once, and then no more
are heard, so that none breaks off what is being cleaned up."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

STDERR = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_S = 0.02  # after which a signal that came where nothing can be raised is sent again
MESSAGE = "interrupted: {}stopping (once more: stop at once)\n"


class Interrupts:
    """Handlers for the time of a block, in which a signal raises KeyboardInterrupt. Outside the main thread it hears
    nothing, because Python delivers signals there only."""

    def __init__(self, *, saves: bool = True) -> None:
        """`saves`: what is told of a signal that is put off."""
        self.requested = False  # by a signal that was put off
        self._message = MESSAGE.format("saving, then " if saves else "").encode()
        self._puts_off = self._raised = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """In the block the first signal sets `requested` and nothing else."""
        self._puts_off = True
        try:
            yield
        finally:
            self._puts_off = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._raised:
            return
        if self._puts_off and not self.requested:
            self.requested = True
            with suppress(OSError):  # nobody reads it; and `print` must not be called in the midst of a print
                os.write(STDERR, self._message)
            return
        if _in_finalizer(frame):
            again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        self._raised = True
        raise KeyboardInterrupt


def _in_finalizer(frame: FrameType | None) -> bool:
    """Python drops what is raised there. A signal during a collection, which takes a second among the objects of
    Transformers, is delivered to the first finalizer of what was collected."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None
