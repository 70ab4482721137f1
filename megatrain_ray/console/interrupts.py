"""Handles Ctrl-C, SIGTERM and SIGHUP, which comes when the terminal or its connection closes.

While a run trains, the first signal asks it to save and end. Any other signal ends it at once. After that no more are
handled, so that none interrupts the clean-up.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from megatrain_ray.errors import InterruptedRunError

STDERR = 2
ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # Ray leaves SIGINT to the driver, and not these
SIGNALS = (signal.SIGINT, *ENDINGS)
AGAIN_S = 0.02  # seconds after which a signal is sent again that came where no exception should be raised
ERASE_LINE = "\r\x1b[2K"  # of a terminal: what is drawn there, such as a bar, and the ^C that it shows
MESSAGE = "interrupted: {} (once more: stop at once{})\n"


class Interrupts:
    """Installs signal handlers for a block, in which a signal raises KeyboardInterrupt.

    SIGHUP stays ignored if it is, as nohup wishes. Outside the main thread this does nothing, because Python delivers
    signals only there.
    """

    def __init__(self, *, saves: bool = True) -> None:
        """Prepare the handlers. `saves`: the message about a deferred signal says that the run saves first."""
        self.requested = False  # set by a deferred signal
        self._message = (ERASE_LINE if os.isatty(STDERR) else "").encode() + MESSAGE.format(
            *(("saving, then stopping, after the steps under way", ", without a save") if saves else ("stopping", ""))
        ).encode()
        self._puts_off = self._raised = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            wanted = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in wanted}
        return self

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Defer the first signal in the block: it only sets `requested` and prints a message."""
        self._puts_off = True
        try:
            yield
        finally:
            self._puts_off = False

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Raise KeyboardInterrupt for another error if one was raised before: Transformers makes such of it."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._raised and error is not None and not isinstance(error, KeyboardInterrupt | InterruptedRunError):
            raise KeyboardInterrupt from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._raised:
            return
        if self._puts_off and not self.requested:
            self.requested = True
            with suppress(OSError):  # nobody reads it. Not `print`, which must not be called within itself
                os.write(STDERR, self._message)
            return
        if _is_unsafe(frame):
            again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        self._raised = True
        raise KeyboardInterrupt


def _is_unsafe(frame: FrameType | None) -> bool:
    """Return whether an exception raised in the frame may be dropped, or abort the process.

    Python drops what is raised in a `__del__` method. A signal during a garbage collection, which takes up to a second,
    is delivered to the first of them. Torch's C++ code drops some exceptions of the Python code that it calls, and
    aborts at others.
    """
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__", "").startswith("torch."):
            return True
        frame = frame.f_back
    return False
