"""Configurations of runs whose host memory has no room for all optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain_ray.config_file import load_config
from megatrain_ray.engine.hardware_profile import TYPICAL_CPU
from megatrain_ray.errors import CapacityError
from megatrain_ray.planning import Question, question_of
from tests.runs import write_config

DISK_BYTES_PER_S = 1e9


def spilling(folder: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with a little less host memory than it needs, and a folder on disk."""
    too_little = _too_little_ram(question_of(load_config(write_config(folder / "question.yaml", tree))))
    return _limited(tree, too_little, folder / "spill")


def with_gradients_on_disk(folder: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with a folder on disk, and the most host memory with which gradients wait there, too."""
    enough = _too_little_ram(question_of(load_config(write_config(folder / "question.yaml", tree))))
    limited = _limited(tree, enough, folder / "spill")
    question = question_of(load_config(write_config(folder / "question.yaml", limited)))
    least = _too_little_ram(question) + 4096
    for ram_bytes in range(enough, least - 1, (least - enough) // 32):
        if _within(question, ram_bytes).plan().stored_layers:
            return _limited(tree, ram_bytes, folder / "spill")
    raise AssertionError("no gradient ever waits on disk")


def with_all_on_disk(folder: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with a folder on disk, and just as much host memory as it needs then."""
    limited = _limited(tree, 1 << 36, folder / "spill")
    question = question_of(load_config(write_config(folder / "question.yaml", limited)))
    return _limited(tree, _too_little_ram(question) + 4096, folder / "spill")


def least_ram(folder: Path, tree: Mapping[str, Any]) -> int:
    """A hardware.ram_limit with which the configuration, which has a spill.path, just fits: with all that may be on
    disk there."""
    question = question_of(load_config(write_config(folder / "question.yaml", tree)))
    assert question.machine.spill is not None
    return _too_little_ram(question) + 4096


def _limited(tree: Mapping[str, Any], ram_bytes: int, on_disk: Path) -> dict[str, Any]:
    """With rates that are always the same, since what goes to the disk depends on how fast it is: a slow one, to which
    nothing goes that need not."""
    rates = on_disk.parent / "rates.json"
    rates.write_text(replace(TYPICAL_CPU, disk_bytes_per_s=DISK_BYTES_PER_S).to_json())
    hardware = {"profile": str(rates), **tree.get("hardware", {}), "ram_limit": ram_bytes}
    spill = {"path": str(on_disk), "compression": "none", **tree.get("spill", {})}
    return {**tree, "hardware": hardware, "spill": spill}


def _too_little_ram(question: Question) -> int:
    """A hardware.ram_limit with which it just does not fit."""
    plenty = _within(question, 1 << 36).plan()
    low = next(row.num_bytes for row in plenty.rows if row.name == "processes")  # does not fit
    high = sum(row.num_bytes for row in plenty.rows if row.name != "copies for saves")  # fits
    while high - low > 4096:
        middle = (low + high) // 2
        try:
            _within(question, middle).plan()
        except CapacityError:
            low = middle
        else:
            high = middle
    return low


def _within(question: Question, ram_bytes: int) -> Question:
    return replace(question, machine=replace(question.machine, ram_bytes=ram_bytes))
