"""Implements `megatrain inspect`: shows what is in a run directory. Only reads, so the run may be active."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatrain_ray.accounting.trace_file import busy_share, find_traces, read_trace
from megatrain_ray.config.yaml_file import dump_config
from megatrain_ray.console.progress import describe_evaluation, describe_split
from megatrain_ray.console.text_charts import draw
from megatrain_ray.errors import MegatrainError
from megatrain_ray.escapes import escaped
from megatrain_ray.io.saves.save_folder import list_saves, list_set_aside, load_manifest, save_folder, verify
from megatrain_ray.report.measured_starts import compare_start, comparison_table, measured_starts
from megatrain_ray.report.page_placement import pages_of_run
from megatrain_ray.report.run_header import describe_run, headline
from megatrain_ray.report.run_state import read_state
from megatrain_ray.report.sound_rows import sound
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_history import read_history
from megatrain_ray.units import format_bytes, format_count

NUM_ROWS = 5
REWARDS = (  # of preferences and of rollouts
    "reward_chosen", "reward_margin", "reward_accuracy", "reward", "kl", "clipped_low", "clipped_high", "ratio_max",
    "entropy",
)  # fmt: skip
SHOWN = {"loss", "grad_norm", "lr", "tokens_per_s", "skipped"}  # columns
EVALUATED = {"eval_loss", "eval_tokens", "eval_s"}
SPLIT = {"exposed_s", "step_s"}  # columns that rows of earlier versions lack
NUM_PROBLEMS = 10  # problems that are shown of one save


def state_of_run(path: Path) -> str:
    """Return the state of the run in a few lines, without reading its saves.

    Raises ConfigError if `path` holds no run.
    """
    files = RunFiles(path.absolute())
    config, rows = files.read_config(), sound(files.rows())
    run = describe_run(files, config, files.read_plan(), read_history(files.path))
    numbers = headline(rows, sound(files.evaluations()))
    return _text(
        {
            "run": [f"{name:<7} {value}" for name, value in run.items()],
            "state": list(read_state(files, config, rows).lines()),
            "result": [f"{name:<23} {value}" for name, value in numbers.items()] or ["none yet"],
        }
    )


def inspect_run(path: Path, *, with_config: bool = False, verify_saves: bool = False) -> tuple[str, bool]:
    """Return a report of several lines, and whether all saves are intact.

    with_config: show the whole configuration as well.
    verify_saves: read every byte of the saves. Without it they count as intact.

    Raises ConfigError if `path` holds no run.
    """
    files = RunFiles(path.absolute())
    config = files.read_config()
    rows, evaluations = sound(files.rows()), sound(files.evaluations())
    problems = _problems(files.saves) if verify_saves else {}
    best = files.best_save  # it has the least eval_loss
    saves = [
        f"step {f'{step}, best' if step == best else step:<12} {_save(files.saves, step)}"
        for step in list_saves(files.saves)
    ]
    saves += [
        f"{path.name:<17} {format_bytes(_size(path))}, set aside: nothing reads or deletes it"
        for path in list_set_aside(files.saves)
    ]
    newest = rows[-NUM_ROWS:]
    sections = {
        "config": dump_config(config).splitlines() if with_config else [],
        "curves": list(draw([*rows, *evaluations])) or ["none: fewer than two updates"],
        "saves": saves or ["none"],
        "last rows": [_row(row) for row in newest] or ["none"],
        "mean step": [describe_split(newest)] if newest and _is_split(newest) else [],
        "plan and measurement": _compared(files),
        "pages": _pages(files),
        "traces": list(map(_trace, find_traces(files.path))),
        "last evaluations": [describe_evaluation(row) for row in evaluations[-NUM_ROWS:] if row.keys() >= EVALUATED],
        "checksums": [line for step in sorted(problems, reverse=True) for line in _verdict(step, problems[step])],
    }
    if verify_saves:
        sections["checksums"] = sections["checksums"] or ["nothing to check"]
    shown = {title: lines for title, lines in sections.items() if lines}
    return _text(shown), not any(problems.values())


def _text(sections: dict[str, list[str]]) -> str:
    """Return sections as text, in which every line is a title or one of the given lines."""
    return "\n".join(escaped(line) for title, found in sections.items() for line in (title, *_indented(found)))


def _indented(lines: list[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _problems(saves: Path) -> dict[int, list[str]]:
    """Return the problems of each save, newest first. Saves that an active training deletes meanwhile are left out."""
    found = {step: verify(save_folder(saves, step)) for step in reversed(list_saves(saves))}
    return {step: problems for step, problems in found.items() if not problems or step in list_saves(saves)}


def _is_split(rows: list[dict[str, Any]]) -> bool:
    """Return whether all rows say where their step's seconds went, by the same causes."""
    return all(row.keys() >= SPLIT and row["exposed_s"].keys() == rows[0]["exposed_s"].keys() for row in rows)


def _save(saves: Path, step: int) -> str:
    """Return the size of a save, and what it cost if the manifest says so."""
    size = format_bytes(_size(save_folder(saves, step)))
    with suppress(MegatrainError):  # `_verdict` reports the problem
        if timing := load_manifest(saves, step).timing:
            return (
                f"{size} in {timing.write_s:.1f} s, updates waited {timing.stall_s:.1f} s "
                f"({timing.predicted_stall_s:.1f} s predicted)"
            )
    return size


def _verdict(step: int, problems: list[str]) -> list[str]:
    if not problems:
        return [f"step {step}: good"]
    left = len(problems) - NUM_PROBLEMS
    return [f"step {step}: DAMAGED", *problems[:NUM_PROBLEMS], *([f"and {left} more"] if left > 0 else [])]


def _row(row: dict[str, Any]) -> str:
    if not row.keys() >= SHOWN:
        return f"step {row['step']:<8} incomplete row: {sorted(SHOWN - row.keys())} missing"
    rewards = [f"  {key.removeprefix('reward_')} {_number(row[key])}" for key in REWARDS if key in row]
    notes = "  skipped" if row["skipped"] else ""
    notes += "  host memory aliased: the loss means nothing" if row.get("aliased") else ""
    return (
        f"step {row['step']:<8} loss {_number(row['loss'])}{''.join(rewards)}  grad_norm {_number(row['grad_norm'])}  "
        f"lr {row['lr']:.3g}  {format_count(row['tokens_per_s'])} tokens/s{notes}"
    )


def _compared(files: RunFiles) -> list[str]:
    """Compare the newest start with its plan. Empty if it has too few steps, or was made by an earlier version."""
    start = next(reversed(measured_starts(files)), None)
    if start is None:
        return []
    if files.read_plan(start.plan_sha256) is None:
        steps = f"steps {start.rows[0]['step']} to {start.rows[-1]['step']}"
        return [f"{steps}, by the plan {start.plan_sha256[:12]}, which is not in this folder any more"]
    found = compare_start(files, start)
    return list(comparison_table(found)) if found else []


def _pages(files: RunFiles) -> list[str]:
    """Return on which NUMA nodes the pages of arenas are."""
    try:
        return list(map(str, pages_of_run(files)))
    except OSError as error:
        return [f"the kernel does not say: {error.strerror}"]


def _trace(path: Path) -> str:
    try:
        return f"{path.name}: the compute stage worked {busy_share(read_trace(path)):.1%} of the time"
    except (MegatrainError, ValueError, LookupError, TypeError, EOFError):
        return f"{path.name}: no trace of this version"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _size(folder: Path) -> int:
    """Return the bytes of the folder's files. A file that is deleted meanwhile counts as 0."""
    total = 0
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
