"""`megatrain bench`: a configuration's speed, beside what the same layers do when nothing has to move, and beside the
same steps without Ray."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_ray.bench_config import BenchOptions
from megatrain_ray.config import TrainConfig
from megatrain_ray.crew import Crew
from megatrain_ray.in_process import run_in_process
from megatrain_ray.interrupts import Interrupts
from megatrain_ray.own_process import in_own_process
from megatrain_ray.planning import Prepared
from megatrain_ray.process_memory import DeviceMemory, device_memory, pss_of_run
from megatrain_ray.resident_ceiling import Ceiling, measure_ceiling
from megatrain_ray.session import Job
from megatrain_ray.startup import Startup
from megatrain_ray.trainer import Trainer


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


def measure(config: TrainConfig, options: BenchOptions) -> Measured:
    """Trains, then takes the ceiling, then perhaps trains in one process; standard output stays empty meanwhile.

    Raises what a training does.
    """
    with redirect_stdout(sys.stderr), Interrupts():
        observed, rows = _train(config)
        startup = Startup()
        with startup.phase("measuring the resident ceiling"):
            ceiling = in_own_process("the process of the resident ceiling", measure_ceiling, observed.prepared)
        in_process = None
        if options.compare_in_process:
            with startup.phase("making the same steps in one process"):
                arguments = observed.prepared, observed.tokens
                in_process = in_own_process("the process without Ray", run_in_process, *arguments)
    return Measured(observed.prepared.config, observed, rows, ceiling, in_process)


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
