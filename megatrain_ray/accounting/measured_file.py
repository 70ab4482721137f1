"""Reads and writes measured.json of a run directory.

For each start of the run, the file holds the hash of its plan and what the plan predicted beside what was measured
(docs/metrics.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from megatrain_ray.accounting.prediction_check import Comparison
from megatrain_ray.io.files.atomic_file import write_atomically

MEASURED_NAME = "measured.json"


@dataclass(frozen=True)
class Measured:
    """Holds the content of measured.json.

    starts: one comparison for each start, in the order of their first steps.
    """

    version: Literal[1]
    starts: tuple[Comparison, ...]


_MEASURED = TypeAdapter(Measured)


def read_comparisons(run_dir: Path) -> tuple[Comparison, ...]:
    """Return the comparisons in measured.json; empty if there is no file, or it is damaged or of another version."""
    try:
        return _MEASURED.validate_json((run_dir / MEASURED_NAME).read_bytes()).starts
    except (OSError, ValidationError):
        return ()


def write_comparison(run_dir: Path, found: Comparison) -> None:
    """Write `found` to measured.json of `run_dir`.

    It replaces the comparison of the same start, and those of starts with a later first step: the run went back to
    before them. Raises MegatrainError if the file cannot be written.
    """
    earlier = [start for start in read_comparisons(run_dir) if start.first_step < found.first_step]
    text = _MEASURED.dump_json(Measured(1, (*earlier, found)), indent=1).decode()
    write_atomically(run_dir / MEASURED_NAME, text + "\n")


def comparison_tree(found: Comparison) -> dict[str, Any]:
    """Return the comparison as the plain data that measured.json holds."""
    tree: dict[str, Any] = TypeAdapter(Comparison).dump_python(found, mode="json")
    return tree
