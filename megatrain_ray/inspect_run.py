"""What `megatrain inspect` shows of a run directory. Reads only, also while the run is in use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatrain_ray.config_file import dump_config
from megatrain_ray.io.save import list_saves, save_folder, verify
from megatrain_ray.run_dir import RunFiles
from megatrain_ray.units import format_bytes, format_count

NUM_ROWS = 5


def inspect_run(path: Path) -> tuple[str, bool]:
    """A report of several lines, and whether the newest save is whole (True where there is none).

    Raises ConfigError where `path` holds no run.
    """
    files = RunFiles(path.absolute())
    config = dump_config(files.read_config())
    steps = list_saves(files.saves)
    problems = verify(save_folder(files.saves, steps[-1])) if steps else []
    sections = {
        "config": config.splitlines(),
        "saves": [f"step {step:<8} {format_bytes(_size(save_folder(files.saves, step)))}" for step in steps]
        or ["none"],
        "last rows": [_row(row) for row in files.rows()[-NUM_ROWS:]] or ["none"],
        "checksums": _verdict(steps, problems),
    }
    return "\n".join(_lines(sections)), not problems


SHOWN = {"loss", "grad_norm", "lr", "tokens_per_s", "skipped"}


def _lines(sections: dict[str, list[str]]) -> Iterator[str]:
    for title, lines in sections.items():
        yield title
        yield from (f"  {line}" for line in lines)


def _verdict(steps: list[int], problems: list[str]) -> list[str]:
    if not steps:
        return ["nothing to check"]
    if not problems:
        return [f"step {steps[-1]}: good"]
    return [f"step {steps[-1]}: DAMAGED", *problems]


def _row(row: dict[str, Any]) -> str:
    if not row.keys() >= SHOWN:
        return f"step {row['step']:<8} incomplete row: {sorted(SHOWN - row.keys())} missing"
    skipped = "  skipped" if row["skipped"] else ""
    return (
        f"step {row['step']:<8} loss {_number(row['loss'])}  grad_norm {_number(row['grad_norm'])}  "
        f"lr {row['lr']:.3g}  {format_count(row['tokens_per_s'])} tokens/s{skipped}"
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
