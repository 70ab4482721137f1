"""Identifies a file, so that a change of it is noticed later."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def file_identity(file: Path) -> list[Any]:
    """Return path, size and modification time of a file, by which it is recognised later. Raises OSError."""
    real = file.resolve()
    stats = real.stat()
    return [str(real), stats.st_size, stats.st_mtime_ns]
