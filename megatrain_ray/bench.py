"""`megatrain bench`: a configuration's speed, beside what the same layers do when nothing has to move, and beside the
same steps without Ray."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_ray.config import TrainConfig
from megatrain_ray.config_file import load_config
from megatrain_ray.crew import Crew
from megatrain_ray.errors import ConfigError
from megatrain_ray.in_process import run_in_process
from megatrain_ray.interrupts import Interrupts
from megatrain_ray.own_process import in_own_process
from megatrain_ray.planning import Prepared
from megatrain_ray.process_memory import DeviceMemory, device_memory, pss_of_run
from megatrain_ray.resident_ceiling import Ceiling, measure_ceiling
from megatrain_ray.session import Job
from megatrain_ray.startup import Startup
from megatrain_ray.trainer import Trainer

# Nothing but steps is measured. Their learning rate does not change what they cost.
SETTINGS = (
    "train.warmup_steps=0",
    "train.schedule=constant",
    "save_every=null",
    "eval_every=0",
    "resume=false",
    "log={tensorboard: false}",
)


@dataclass(frozen=True)
class BenchOptions:
    """`warmup`: steps before the measured ones. `commit`: of the code, where it is not run from a checkout."""

    warmup: int
    steps: int
    compare_in_process: bool
    commit: str | None = None


@dataclass(frozen=True)
class Observed:
    """What was looked up in the run's processes after its last step."""

    prepared: Prepared
    tokens: tuple[Path, ...]
    kernel_names: tuple[str, ...]
    pss_bytes: Mapping[str, Mapping[str, int]]
    device_memory: DeviceMemory


@dataclass(frozen=True)
class Measured:
    """`rows`, `in_process`: of all steps, warm-up first; the latter None where it was not asked for."""

    config: TrainConfig
    observed: Observed
    rows: Sequence[Mapping[str, Any]]
    ceiling: Ceiling
    in_process: Sequence[Mapping[str, Any]] | None


def measure(path: Path, overrides: Sequence[str], options: BenchOptions) -> Measured:
    """Trains, then takes the ceiling, then perhaps trains in one process; standard output stays empty meanwhile.

    Raises what a training does.
    """
    with tempfile.TemporaryDirectory(prefix="megatrain-bench-") as folder, redirect_stdout(sys.stderr), Interrupts():
        config = bench_config(path, overrides, options, Path(folder) / "run")
        observed, rows = _train(config)
        startup = Startup()
        with startup.phase("measuring the resident ceiling"):
            ceiling = in_own_process("the process of the resident ceiling", measure_ceiling, observed.prepared)
        in_process = None
        if options.compare_in_process:
            with startup.phase("the same steps in one process"):
                arguments = observed.prepared, observed.tokens
                in_process = in_own_process("the process without Ray", run_in_process, *arguments)
    return Measured(observed.prepared.config, observed, rows, ceiling, in_process)


def bench_config(path: Path, overrides: Sequence[str], options: BenchOptions, run_dir: Path) -> TrainConfig:
    """The configuration with what a benchmark sets itself. `run_dir`: used unless an override names another; that of
    the file may hold a run. Raises ConfigError, also where an override sets what a benchmark does."""
    own = (*SETTINGS, f"train.steps={options.warmup + options.steps}")
    keys = {_key(setting) for setting in own}
    for key in map(_key, overrides):
        if key in keys or key.startswith("log."):
            raise ConfigError(f"{key}: a benchmark sets it itself; leave it out (--warmup and --steps say how long)")
    return load_config(path, [f"run_dir={json.dumps(str(run_dir))}", *overrides, *own])


def _key(override: str) -> str:
    return override.partition("=")[0]


def _train(config: TrainConfig) -> tuple[Observed, Sequence[Mapping[str, Any]]]:
    seen: list[Observed] = []
    summary = Trainer(config).fit(lambda job, crew: seen.append(_observe(job, crew)))
    return seen[-1], summary.rows


def _observe(job: Job, crew: Crew) -> Observed:
    on_gpu = job.prepared.plan.device == "cuda"
    return Observed(
        prepared=job.prepared,
        tokens=job.tokens,
        kernel_names=tuple(crew.kernel_names),
        pss_bytes=pss_of_run(crew.pids),
        device_memory=device_memory(crew.pids["GPU worker"]) if on_gpu else DeviceMemory(None, "the device is the CPU"),
    )
