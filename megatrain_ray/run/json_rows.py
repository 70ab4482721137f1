"""Reads and appends files with one JSON object per line. Lines that are no rows are left out: a kill can tear one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def parse_rows(text: str, is_row: Callable[[Row], bool]) -> list[Row]:
    """Return the lines of a file that are JSON objects, and rows as `is_row` says."""
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and is_row(row):
            rows.append(row)
    return rows


def append_row(file: Path, row: Mapping[str, Any]) -> None:
    """Add a row; non-finite numbers become null. Raises OSError."""
    line = json.dumps(_finite(row), allow_nan=False) + "\n"
    with file.open("a", encoding="utf-8") as rows:
        rows.write(line)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
