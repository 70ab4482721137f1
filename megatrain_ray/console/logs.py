"""What the driver says and writes down. No full disk, closed pipe or missing folder behind it ends a training."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from megatrain_ray.errors import InterruptedRunError

log = logging.getLogger(__name__)


class _FileLog(logging.FileHandler):
    """Loses what cannot be written."""

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
    """Appends what this package logs, from INFO on, to a file for the time of the block, once its folder is there. What
    ends the block or a thread is logged too."""
    logger = logging.getLogger("megatrain_ray")
    before = logger.level
    handler = _FileLog(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
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
    """For libraries' threads; ours hand their errors over."""
    name = ended.thread.name if ended.thread else "a thread"
    log.error("%s ended by %s", name, ended.exc_type.__name__, exc_info=ended.exc_value)


def say(message: str) -> None:
    """Tells user and log."""
    log.info(message)  # as a warning it would be printed twice where no log is open yet
    show(message, sys.stderr)


def show(text: str, stream: TextIO | None = None) -> None:
    """Prints a line, on standard output unless told otherwise."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        silence(stream)


def is_unread(stream: TextIO) -> bool:
    """Whether it is a pipe whose reader has gone."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def silence(stream: TextIO) -> None:
    """Nobody reads it any more. What its buffer still holds would fail when the interpreter ends: exit code 120."""
    with suppress(OSError, ValueError):  # ValueError: no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
