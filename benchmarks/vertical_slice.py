"""Trains two shapes twice each on a GPU, by the CLI through Ray (the vertical slice).

    python benchmarks/vertical_slice.py OUT_FOLDER COMMIT [key=value …]

Writes OUT_FOLDER/vertical_slice.json: losses, whether two deterministic runs agree, rates and memory.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.scratch import fresh

ROOT = Path(__file__).parent.parent
TEXT = ROOT / "examples" / "data" / "tinyshakespeare.txt"
BATCH_TOKENS = 8 * 1025  # one batch of 8 windows of 1024 + 1 bytes: every epoch is the same batch


def train(config: Path, run_dir: Path, *overrides: str) -> dict[str, Any]:
    """Run a configuration in a process of its own, in a directory that is free; return its rows and how it ended."""
    command = [sys.executable, "-m", "megatrain_ray", "train", str(config), f"run_dir={run_dir}", *overrides]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    metrics = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    result = {
        "command": " ".join(command[1:]),
        "exit": done.returncode,
        "wall_s": time.monotonic() - start,
        "rows": rows,
    }
    if done.returncode:
        result["stderr"] = done.stderr[-4000:]
    return result


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    rows = runs[0]["rows"]
    steady = sorted(rows[4:], key=lambda row: row["step_s"])
    median = steady[len(steady) // 2]
    return {
        "exit": [run["exit"] for run in runs],
        "first_loss": rows[0]["loss"] if rows else None,
        "last_loss": rows[-1]["loss"] if rows else None,
        "runs_identical": [r["loss"] for r in rows] == [r["loss"] for r in runs[1]["rows"]] and len(rows) >= 20,
        "median_step_s": median["step_s"],
        "model_tflops": median["model_tflops"],
        "tokens_per_s": median["tokens_per_s"],
        "exposed_s": median["exposed_s"],
        "hbm_peak_bytes": rows[-1]["hbm_peak_bytes"],
        "host_bytes": rows[-1]["host_bytes"],
    }


def machine() -> dict[str, Any]:
    import ray
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "commit": sys.argv[2],
        "gpu": gpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ray": ray.__version__,
        "cores": os.cpu_count(),
    }


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    batch = ROOT / "runs" / "one_batch.txt"
    batch.parent.mkdir(exist_ok=True)
    batch.write_bytes(TEXT.read_bytes()[:BATCH_TOKENS])
    report: dict[str, Any] = {"machine": machine(), "runs": {}}
    for config in (ROOT / "benchmarks" / "configs" / f"qwen2.5_{size}.yaml" for size in ("0.5b", "1.5b")):
        runs = [train(config, fresh(ROOT / "runs" / f"{config.stem}_{i}"), *sys.argv[3:]) for i in range(2)]
        report["runs"][config.stem] = {"summary": summary(runs) if runs[0]["rows"] else None, "raw": runs}
        print(config.stem, json.dumps(report["runs"][config.stem]["summary"]), flush=True)
        for run in runs:
            print(run.get("stderr", ""), flush=True)
    (out / "vertical_slice.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
