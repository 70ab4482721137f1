"""Configurations of runs whose host memory has no room for all optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain_ray.config_file import load_config
from megatrain_ray.errors import CapacityError
from megatrain_ray.planning import Question, question_of
from tests.runs import write_config


def spilling(folder: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with a little less host memory than it needs, and a folder on disk."""
    too_little = _too_little_ram(question_of(load_config(write_config(folder / "question.yaml", tree))))
    return {
        **tree,
        "hardware": {**tree.get("hardware", {}), "ram_limit": too_little},
        "spill": {"path": str(folder / "spill")},
    }


def _too_little_ram(question: Question) -> int:
    """A hardware.ram_limit with which it just does not fit."""
    low, high = 0, 1 << 36  # does not fit, fits
    while high - low > 4096:
        middle = (low + high) // 2
        try:
            replace(question, machine=replace(question.machine, ram_bytes=middle)).plan()
        except CapacityError:
            low = middle
        else:
            high = middle
    return low
