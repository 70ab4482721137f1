"""Checks what must hold after a kill, and at the end of a run that was killed many times."""

from __future__ import annotations

import hashlib
import re
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kill_campaign.cases import SAVE_KEEP, Outcome
from benchmarks.kill_campaign.live_run import LiveRun
from benchmarks.kill_campaign.processes import TITLES, Role
from megatrain_ray.crew.ray_cluster import remove_left_sessions
from megatrain_ray.export.export import export_run
from megatrain_ray.io.saves.save_folder import list_saves, save_folder, verify
from tests.support.runs import plan_of, rows

# Ray's own helpers outlive a driver that was killed for as long as they look for its GCS (60 s by Ray's default).
RAY_END_S = 75.0
ACTORS_END_S = 20.0
COMPARED = ("step", "loss", "grad_norm", "lr", "tokens", "skipped")
OK = "ok"


@dataclass(frozen=True)
class Undisturbed:
    """Holds what a run gave that nobody killed: its rows, and a digest of its exported FP32 masters.

    save_bytes: bytes of all blobs of a save.
    master_bytes: bytes of the masters.
    """

    rows: list[dict[str, Any]]
    digest: str
    save_bytes: int
    master_bytes: int

    @staticmethod
    def of(run_dir: Path, scratch: Path) -> Undisturbed:
        newest = save_folder(run_dir / "saves", list_saves(run_dir / "saves")[-1])
        blobs = (path for path in newest.iterdir() if path.name != "manifest.json")
        master_bytes = 4 * sum(layer.num_parameters for layer in plan_of(run_dir).layers)
        save_bytes = sum(path.stat().st_size for path in blobs)
        return Undisturbed(compared(run_dir), digest(run_dir, scratch), save_bytes, master_bytes)


def compared(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics without times."""
    return [{key: row[key] for key in COMPARED} for row in rows(run_dir)]


def digest(run_dir: Path, scratch: Path) -> str:
    """Return the digest of the FP32 masters of the newest save, exported into a new folder beside `scratch`."""
    with tempfile.TemporaryDirectory(dir=scratch.parent) as folder:
        export_run(run_dir, Path(folder) / scratch.name, "fp32")
        return folder_digest(Path(folder) / scratch.name)


def folder_digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def of_rows(run_dir: Path, undisturbed: Undisturbed, *, whole: bool = False) -> str:
    found, expected = compared(run_dir), undisturbed.rows
    if whole and len(found) != len(expected):
        return f"{len(found)} rows, expected {len(expected)}"
    wrong = next((ours for ours, theirs in zip(found, expected, strict=False) if ours != theirs), None)
    return OK if wrong is None else f"row differs from the undisturbed run's: {wrong}"


def of_saves(run_dir: Path, before: Collection[int]) -> str:
    """Verify all saves, and check that the newest SAVE_KEEP are there.

    before: steps of the saves that had their manifest when the kill came. The newest of these and of those made since
        must be there.
    """
    saves = run_dir / "saves"
    there = list_saves(saves)
    problems = [problem for step in there for problem in verify(save_folder(saves, step))]
    lost = set(sorted({*before, *there})[-SAVE_KEEP:]) - set(there)
    problems += [f"the save of step {step} is lost: {there}" for step in sorted(lost)]
    return "; ".join(problems) or OK


def of_message(run: LiveRun, outcome: Outcome, roles: set[Role]) -> str:
    """Check that one line of error names who died; none where the run goes on or nobody was left to write it."""
    errors = [line for line in run.text().splitlines() if line.startswith("error:")]
    if "Traceback" in run.text():
        return f"a traceback: {run.last_words()}"
    if outcome is not Outcome.ENDED:
        return OK if not errors else f"unexpected: {errors}"
    named = len(errors) == 1 and any(role.value in errors[0] for role in roles)
    return (
        OK if named else f"expected one error that names {[r.value for r in roles]}, got {errors}: {run.last_words()}"
    )


def of_processes(run: LiveRun, outcome: Outcome) -> str:
    """Check that no process is left.

    If the driver itself was killed, only actors count: Ray's helpers have `RAY_END_S`.
    """
    if outcome is not Outcome.SILENT:
        return of_all_processes([run], 5.0)
    deadline_s = time.monotonic() + ACTORS_END_S
    while left := [line for line in run.processes.left() if any(title in line for title in TITLES.values())]:
        if time.monotonic() > deadline_s:
            return f"still there: {left}"
        time.sleep(0.1)
    return OK


def of_all_processes(runs: Sequence[LiveRun], timeout_s: float = RAY_END_S) -> str:
    left = [line for run in runs for line in run.processes.await_end(timeout_s)]
    return OK if not left else f"still there: {left}"


def of_folders(drivers: Sequence[int]) -> str:
    """Check for session folders of these drivers that the next start would not remove."""
    remove_left_sessions()
    left = [str(path) for pid in drivers for path in Path("/tmp").glob(f"megatrain-{pid}-*")]
    return OK if not left else f"left: {left}"


def of_shared_memory(before: set[str]) -> str:
    """Check that no name stays in /dev/shm that is not in `before`."""
    deadline_s = time.monotonic() + 10.0
    while (left := shared_memory_names() - before) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return OK if not left else f"left: {sorted(left)}"


def shared_memory_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def of_unfinished(run_dir: Path) -> str:
    """Check that nothing is half written in the run directory once a run has ended well."""
    left = [str(path) for path in run_dir.parent.rglob("*") if re.search(r"\.(partial|new)$", path.name)]
    left += [str(path) for path in (run_dir / "saves").iterdir() if not (path / "manifest.json").exists()]
    return OK if not left else f"left: {left}"


def problems(checks: Mapping[str, str]) -> list[str]:
    return [f"{name}: {verdict}" for name, verdict in checks.items() if verdict != OK]
