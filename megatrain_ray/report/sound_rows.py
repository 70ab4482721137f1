"""Leaves out of rows of metrics what no version wrote there, so that a damaged or edited file can still be shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from megatrain_ray.run.run_files import Row

LARGEST = 1e100  # sums and charts of larger numbers overflow
LARGEST_STEP = 2**53  # beyond it, neighbours are equal as floats
NULLABLE = ("loss", "cross_entropy", "grad_norm", "eval_loss", "perplexity")  # null: not finite
MAPPINGS = ("exposed_s", "disk_bytes", "eval_losses")  # of numbers
TYPES = {"skipped": bool, "aliased": bool, "bad_parameter": str}


def sound(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return the rows with a possible step, each without the values that are of another type or far too large."""
    return [
        {key: value for key, value in row.items() if _is_sound(key, value)}
        for row in rows
        if 0 <= row["step"] < LARGEST_STEP
    ]


def _is_sound(key: str, value: Any) -> bool:
    if key in MAPPINGS:
        return isinstance(value, Mapping) and all(map(is_number, value.values()))
    if key in TYPES:
        return isinstance(value, TYPES[key])
    return is_number(value) or (value is None and key in NULLABLE)


def is_number(value: Any) -> bool:
    """Return whether this is a number that can be shown."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and abs(value) <= LARGEST and math.isfinite(value)
