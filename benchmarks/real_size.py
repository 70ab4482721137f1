"""Trains, saves and resumes at real size on a GPU, through the CLI and Ray.

    python -m benchmarks.real_size OUT_FOLDER COMMIT PART [key=value …]

PART is one of
    train   the 7.6B shape, 16 × 1024 tokens, 24 steps on one repeated batch, saves off
    save    the 3.1B shape: two saves while training goes on, and what they cost
    resume  the 3.1B shape: saved while training goes on, killed by SIGKILL, resumed; equal to an undisturbed run?
    races   the 0.5B shape three times in deterministic mode: are all losses and norms identical?

Writes OUT_FOLDER/real_size_PART.json.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.scratch import fresh
from benchmarks.vertical_slice import ROOT, TEXT, machine, train

CONFIGS = ROOT / "benchmarks" / "configs"
RUNS = ROOT / "runs"
POLL_S = 0.05
NUMBERS = ("step", "loss", "grad_norm")


def write_batches() -> None:
    """Write the texts of the configurations: one batch each, so that every epoch is the same batch."""
    RUNS.mkdir(exist_ok=True)
    for name, windows in {"one_batch.txt": 8, "batch_16.txt": 16}.items():
        (RUNS / name).write_bytes(TEXT.read_bytes()[: windows * 1025])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    steady = sorted(rows[4:], key=lambda row: row["step_s"])
    median = steady[len(steady) // 2]
    keys = ("step_s", "model_tflops", "tokens_per_s", "exposed_s", "hbm_peak_bytes", "host_bytes")
    return {"first_loss": rows[0]["loss"], "last_loss": rows[-1]["loss"], **{key: median[key] for key in keys}}


def run_train(overrides: list[str]) -> dict[str, Any]:
    run = train(CONFIGS / "qwen2.5_7b.yaml", fresh(RUNS / "real_7b"), *overrides)
    return {"summary": summary(run["rows"]) if run["rows"] else None, "raw": run}


def run_races(overrides: list[str]) -> dict[str, Any]:
    runs = [train(CONFIGS / "qwen2.5_0.5b.yaml", fresh(RUNS / "races"), *overrides) for _ in range(3)]
    numbers = [[[row[key] for key in NUMBERS] for row in run["rows"]] for run in runs]
    return {"identical": numbers[0] == numbers[1] == numbers[2] and len(numbers[0]) > 0, "raw": runs}


def run_resume(overrides: list[str]) -> dict[str, Any]:
    """Train undisturbed without saves; then save after steps 4 and 8, kill once both are there, and resume."""
    config = CONFIGS / "qwen2.5_3b.yaml"
    undisturbed = train(config, fresh(RUNS / "real_3b"), *overrides)
    run_dir = fresh(RUNS / "real_3b")
    killed = save_twice_and_kill(config, run_dir, overrides)
    start_s = time.monotonic()
    command = [sys.executable, "-m", "megatrain_ray", "train", str(config), f"run_dir={run_dir}", *overrides]
    resumed = subprocess.run(command, capture_output=True, text=True)
    rows = rows_of(run_dir)
    same = [[row[key] for key in NUMBERS] for row in rows] == [
        [row[key] for key in NUMBERS] for row in undisturbed["rows"]
    ]
    return {
        "identical_to_undisturbed": same,
        "num_rows": len(rows),
        "undisturbed": undisturbed,
        "killed": killed,
        "resumed": {"exit": resumed.returncode, "wall_s": time.monotonic() - start_s, "stderr": resumed.stderr[-2000:]},
        "driver_log": (run_dir / "logs" / "driver.log").read_text()[-4000:],
        "rows": rows,
    }


def run_save(overrides: list[str]) -> dict[str, Any]:
    return save_twice_and_kill(CONFIGS / "qwen2.5_3b.yaml", fresh(RUNS / "real_3b"), ["train.steps=24", *overrides])


def save_twice_and_kill(config: Path, run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """Train with saves after steps 4 and 8, and kill the run once the second is there and a step has followed it."""
    process = start(config, run_dir, overrides)
    saves = [wait_for_save(run_dir, step, process) for step in (4, 8)]
    kill(process)
    rows = rows_of(run_dir)
    quiet_s = sorted(row["step_s"] for row in rows[1:4])[1]
    longer_s = {row["step"]: row["step_s"] - quiet_s for row in rows[4:]}
    return {"quiet_step_s": quiet_s, "steps_longer_by_s": longer_s, "saves": saves, "rows": rows}


def start(config: Path, run_dir: Path, overrides: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatrain_ray", "train", str(config), f"run_dir={run_dir}"]
    return subprocess.Popen([*command, *overrides, "save_every=4", "save_keep=1"], stderr=subprocess.PIPE, text=True)


def wait_for_save(run_dir: Path, step: int, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait until the save of `step` is there and a step after it has ended; return what the save cost."""
    manifest = run_dir / "saves" / f"step_{step}" / "manifest.json"
    wait_for(manifest.exists, process)
    timing = json.loads(manifest.read_bytes())["timing"]
    folder_bytes = sum(path.stat().st_size for path in manifest.parent.iterdir())
    wait_for(lambda: len(rows_of(run_dir)) > step, process)
    rate = timing["nbytes"] / timing["write_s"]
    return {"step": step, "timing": timing, "bytes_per_s": rate, "folder_bytes": folder_bytes}


def kill(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete rows of the metrics: the last line may still be being written."""
    metrics = run_dir / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not ready():
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode}: {process.stderr and process.stderr.read()}")
        time.sleep(POLL_S)


def main() -> None:
    out, part, overrides = Path(sys.argv[1]), sys.argv[3], sys.argv[4:]
    out.mkdir(parents=True, exist_ok=True)
    write_batches()
    report = {"machine": machine(), "overrides": overrides, part: PARTS[part](overrides)}
    (out / f"real_size_{part}.json").write_text(json.dumps(report, indent=1))
    print(json.dumps({key: value for key, value in report[part].items() if key not in ("raw", "undisturbed", "rows")}))


PARTS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "train": run_train,
    "save": run_save,
    "resume": run_resume,
    "races": run_races,
}

if __name__ == "__main__":
    main()
