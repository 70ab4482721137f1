"""Trains a tiny model for two thousand steps, to see whether anything grows.

    python -m benchmarks.soak OUT.json [STEPS]

It samples every process of the run at equal numbers of steps: resident memory, descriptors, shared memory; and what
Ray's object store holds. Growth is the slope of a line fitted to the samples of the second half.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ray._private.internal_api import memory_summary

from benchmarks.memory import ROOT
from megatrain_ray import Trainer
from megatrain_ray.config.schema import TrainConfig

NUM_SAMPLES = 20
POLL_S = 0.1


def config(folder: Path, steps: int) -> TrainConfig:
    model = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    tree = {
        "model": {"config": model},
        "data": {"path": str(ROOT / "examples/data/tinyshakespeare.txt"), "tokenizer": "bytes", "seq_len": 32},
        "train": {"steps": steps, "micro_batch_size": 2, "accumulate": 2, "lr": 1e-3},
        "hardware": {"device": "cpu", "num_shards": 2},
        "save_every": steps // 10,
        "run_dir": str(folder / "run"),
    }
    return TrainConfig.model_validate(tree)


def process_sample(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = list(Path(f"/proc/{pid}/fd").iterdir())
    return {
        "anonymous": 1024 * int(status["RssAnon"].split()[0]),
        "shared": 1024 * int(status["RssShmem"].split()[0]),
        "descriptors": len(files),
        "memfds": sum(str(target).startswith("/memfd:") for target in targets(files)),
        "threads": int(status["Threads"]),
    }


def targets(files: list[Path]) -> Iterator[Path]:
    for file in files:
        with suppress(OSError):
            yield file.readlink()


def sample(run: Path, step: int, driver: int) -> dict[str, Any]:
    named = json.loads((run / "processes.json").read_text())["processes"]
    pids = {process["role"]: process["pid"] for process in named} | {"driver": driver}
    return {
        "step": step,
        "processes": {role: process_sample(pid) for role, pid in pids.items()},
        "object_store": memory_summary(stats_only=True).strip().splitlines(),
    }


def watch(run: Path, steps: int, samples: list[dict[str, Any]], ended: threading.Event, driver: int) -> None:
    metrics, due = run / "metrics.jsonl", steps // NUM_SAMPLES
    while not ended.wait(POLL_S):
        done = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
        if done >= due and (run / "processes.json").exists():
            samples.append(sample(run, done, driver))
            due = done + steps // NUM_SAMPLES


def growth(samples: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the growth of each process and kind, in units per thousand steps, over the second half of the samples."""
    late = samples[len(samples) // 2 :]
    steps = [s["step"] for s in late]
    return {
        role: {
            kind: 1000 * statistics.linear_regression(steps, [s["processes"][role][kind] for s in late]).slope
            for kind in late[0]["processes"][role]
        }
        for role in late[0]["processes"]
    }


def main() -> None:
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    samples: list[dict[str, Any]] = []
    ended = threading.Event()
    with TemporaryDirectory() as folder:
        run = config(Path(folder), steps)
        watcher = threading.Thread(target=watch, args=(Path(run.run_dir), steps, samples, ended, os.getpid()))
        watcher.start()
        try:
            Trainer(args=run).train()
        finally:
            ended.set()
            watcher.join()
    report = {"steps": steps, "growth_per_1000_steps": growth(samples), "samples": samples}
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1))
    print(json.dumps(report["growth_per_1000_steps"], indent=1))
    print("\n".join(samples[-1]["object_store"]))


if __name__ == "__main__":
    main()
