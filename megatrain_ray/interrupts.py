"""Ctrl-C and SIGTERM: the first asks the run to save and end, the second ends it at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Handlers for the time of a block; `requested` says that one arrived. Outside the main thread it hears nothing,
    because Python delivers signals there only."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self.listen()
        return self

    def listen(self) -> None:
        """Once more after something that takes the signals for itself, as Ray does with SIGTERM when it connects."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.signal(number, self._handle)
                self._before.setdefault(number, before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("interrupted: saving, then stopping (once more: stop at once)", file=sys.stderr, flush=True)
