"""The driver's log in the run directory: starts, saves, deaths, failures with their tracebacks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Appends what this package logs, from INFO on, to a file for the time of the block."""
    logger = logging.getLogger("megatrain_ray")
    before = logger.level
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.close()


def say(message: str) -> None:
    """Tells user and log."""
    log.info(message)  # as a warning it would be printed twice where no log is open yet
    with suppress(OSError):  # a full disk behind standard error must not end the run
        print(message, file=sys.stderr, flush=True)
