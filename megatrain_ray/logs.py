"""The driver's log in the run directory: starts, saves, failures with their tracebacks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
