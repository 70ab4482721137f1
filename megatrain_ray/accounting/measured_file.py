"""measured.json of a run directory: for each start of the run, its plan's hash and what the plan predicted beside what
was measured (docs/metrics.md)."""

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
    """`starts`: in the order of their first steps."""

    version: Literal[1]
    starts: tuple[Comparison, ...]


_MEASURED = TypeAdapter(Measured)


def read_comparisons(run_dir: Path) -> tuple[Comparison, ...]:
    """Empty where nothing was compared, or what is there is not of this version."""
    try:
        return _MEASURED.validate_json((run_dir / MEASURED_NAME).read_bytes()).starts
    except (OSError, ValidationError):
        return ()


def write_comparison(run_dir: Path, found: Comparison) -> None:
    """In the place of those of the same start, and of starts that began later and were gone back over. Raises
    MegatrainError."""
    earlier = [start for start in read_comparisons(run_dir) if start.first_step < found.first_step]
    text = _MEASURED.dump_json(Measured(1, (*earlier, found)), indent=1).decode()
    write_atomically(run_dir / MEASURED_NAME, text + "\n")


def comparison_tree(found: Comparison) -> dict[str, Any]:
    """As it stands in the file."""
    tree: dict[str, Any] = TypeAdapter(Comparison).dump_python(found, mode="json")
    return tree
