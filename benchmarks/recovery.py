"""Measures how long a run takes to go on after the death of one of its processes, killed from outside in a step.

    python -m benchmarks.recovery OUT.json CONFIG [--role "GPU worker"] [--behind 3] [--beside] [--commit ID] [K=V …]

The process is killed as soon as the row of step `--behind` is there. OUT.json has the seconds from the kill to the next
row, what the run printed about it, and the seconds of its steps. `--beside` also makes the same run undisturbed; its
losses and norms must have the same bits (set train.deterministic on a GPU). Exit code 0: the run ended well, and what
was compared is equal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain_ray.machine.environment import commit, hardware, versions
from megatrain_ray.run.run_processes import PROCESSES_NAME
from tests.support.runs import command, plan_of, rows

LIMIT_S = 540.0
POLL_S = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("--role", default="GPU worker")
    parser.add_argument("--behind", type=int, default=3)
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--commit")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    with tempfile.TemporaryDirectory(prefix="recovery-") as scratch:
        folder = Path(scratch)
        train = command("train", str(options.config), *options.overrides)
        found = disturbed(train, folder / "killed", options.role, options.behind)
        numbers = found["numbers"]
        if options.beside:
            found["same_bits"] = numbers == undisturbed(train, folder / "beside")
        device = plan_of(folder / "killed").device
    about = {"commit": options.commit or commit(), "hardware": hardware(device), "versions": versions()}
    report = {**about, "role": options.role, "overrides": options.overrides, **found}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{found['recovery_s']:.1f} s from the kill to the next row; {found['said']}; {found.get('same_bits', '')}")
    return 0 if found["exit_code"] == 0 and found.get("same_bits", True) else 1


def disturbed(train: Sequence[str], run_dir: Path, role: str, behind: int) -> dict[str, Any]:
    """Run the command, kill the process of `role` once `behind` rows are there, and return what was measured."""
    output = run_dir.with_suffix(".txt")
    with output.open("w") as file:
        process = subprocess.Popen([*train, f"run_dir={run_dir}"], stdout=file, stderr=subprocess.STDOUT)
    try:
        _await(process, run_dir, behind)
        os.kill(pid_of(run_dir, role), signal.SIGKILL)
        killed_s = time.monotonic()
        _await_another(process, run_dir)
        recovery_s = time.monotonic() - killed_s
        exit_code = process.wait(LIMIT_S)
    except BaseException:
        process.terminate()
        process.wait(60)
        sys.stderr.write(output.read_text()[-3000:])
        raise
    said = [line for line in output.read_text().splitlines() if "(failure " in line]
    return {
        "recovery_s": recovery_s, "exit_code": exit_code, "said": said,
        "step_s": [row["step_s"] for row in rows(run_dir)], "numbers": numbers_of(run_dir),
    }  # fmt: skip


def undisturbed(train: Sequence[str], run_dir: Path) -> list[list[float]]:
    """Run the command to its end, and return loss and norm of each step."""
    subprocess.run([*train, f"run_dir={run_dir}"], check=True, capture_output=True, timeout=LIMIT_S)
    return numbers_of(run_dir)


def numbers_of(run_dir: Path) -> list[list[float]]:
    """Return loss and gradient norm of each step."""
    return [[row["loss"], row["grad_norm"]] for row in rows(run_dir)]


def pid_of(run_dir: Path, role: str) -> int:
    """Return the pid of the run's process with this role."""
    processes = json.loads((run_dir / PROCESSES_NAME).read_text())["processes"]
    return next(int(process["pid"]) for process in processes if process["role"] == role)


def _await_another(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Wait until there is one more row than at the fewest: a run that starts again drops the rows that no save has."""
    end_s, fewest = time.monotonic() + LIMIT_S, len(rows(run_dir))
    while (count := len(rows(run_dir))) <= fewest:
        fewest = count
        if process.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError("no other row came")
        time.sleep(POLL_S)


def _await(process: subprocess.Popen[bytes], run_dir: Path, count: int) -> None:
    """Wait until the metrics have `count` rows. Raises RuntimeError if the run ends before, or after LIMIT_S."""
    end_s = time.monotonic() + LIMIT_S
    while not (run_dir / "metrics.jsonl").exists() or len(rows(run_dir)) < count:
        if process.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(f"row {count} did not come")
        time.sleep(POLL_S)


if __name__ == "__main__":
    raise SystemExit(main())
