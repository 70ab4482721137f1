"""Prints and logs the messages of the driver. A full disk, a closed pipe or a missing folder never ends a training."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console

from megatrain_ray.errors import InterruptedRunError
from megatrain_ray.escapes import escaped

log = logging.getLogger(__name__)


class SafeFormatter(logging.Formatter):
    """Formats log records with unsafe characters escaped: a message is one line, a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's name
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802, logging's name
        return escaped(super().formatException(ei), keep="\n")


class _FileLog(logging.FileHandler):
    """Writes log records to a file and drops those that cannot be written."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's name
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Append to a file what this package logs from level INFO on, while the block runs.

    The file is opened at the first record that is written after its folder exists. An exception that ends the block or
    a thread is logged too.
    """
    logger = logging.getLogger("megatrain_ray")
    before = logger.level
    handler = _FileLog(path, encoding="utf-8", delay=True)
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    in_threads, threading.excepthook = threading.excepthook, _log_thread
    try:
        yield
    except InterruptedRunError as end:
        log.info("%s", end)
        raise
    except BaseException as error:
        log.error("ended by %s", type(error).__name__, exc_info=error)
        raise
    finally:
        threading.excepthook = in_threads
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.close()


def _log_thread(ended: threading.ExceptHookArgs) -> None:
    """Log an exception that ended a thread. This concerns threads of libraries; our own pass their errors on."""
    name = ended.thread.name if ended.thread else "a thread"
    log.error("%s ended by %s", name, ended.exc_type.__name__, exc_info=ended.exc_value)


def say(*lines: str) -> None:
    """Print the lines of a message on standard error and log them, with unsafe characters escaped."""
    for line in lines:
        log.info("%s", line)  # a warning would be printed twice while no log file is open yet
    show(*lines, stream=sys.stderr)


def show(*lines: str, stream: TextIO | None = None) -> None:
    """Print lines as `print_lines` does. If that fails, nothing more is printed there."""
    try:
        print_lines(*lines, stream=stream)
    except OSError:
        silence(stream or sys.stdout)


def print_lines(*lines: str, stream: TextIO | None = None) -> None:
    """Print lines on `stream`, by default standard output, with unsafe characters escaped. Raises OSError.

    Line ends in a line are escaped too: names from outside, such as paths and keys, cannot add lines.
    """
    for line in lines:
        print(escaped(line), file=stream or sys.stdout, flush=True)


class _Terminal:
    """Passes on to a stream what rich draws. One that fails, as a terminal that was closed does, is silenced."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            silence(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)


def drawing_on(stream: TextIO) -> Console:
    """Return a console for lines that are redrawn while something else goes on, which no failure of theirs ends."""
    return Console(file=cast("TextIO", _Terminal(stream)))


def cannot_flush(stream: TextIO) -> bool:
    """Return whether the stream holds text that it cannot write."""
    try:
        stream.flush()
    except OSError:
        return True
    return False


def is_unread(stream: TextIO) -> bool:
    """Return whether the stream is a pipe whose reader has closed it."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def silence(stream: TextIO) -> None:
    """Redirect a stream that nobody reads to /dev/null: else its flush at the end makes the exit code 120."""
    with suppress(OSError, ValueError):  # ValueError: the stream has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
