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
from megatrain_ray.busy_share import busy_share
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
from megatrain_ray.trace_file import find_traces, read_trace
from megatrain_ray.trainer import Trainer, TrainSummary


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
    """`rows`, `in_process`: of all steps, warm-up first and the traced one last; the latter, like `ceiling`, None where
    it was not asked for. `busy_share`: of the compute stage, from the trace."""

    config: TrainConfig
    observed: Observed
    rows: Sequence[Mapping[str, Any]]
    busy_share: float
    ceiling: Ceiling | None
    in_process: Sequence[Mapping[str, Any]] | None


def measure(config: TrainConfig, options: BenchOptions) -> Measured:
    """Trains, then, where asked for, takes the ceiling and trains in one process; standard output stays empty.

    Raises what a training does.
    """
    with redirect_stdout(sys.stderr), Interrupts():
        observed, summary = _train(config)
        (trace,) = find_traces(summary.run_dir)
        busy = busy_share(read_trace(trace))
        startup = Startup()
        ceiling = in_process = None
        if options.with_ceiling:
            with startup.phase("measuring the resident ceiling"):
                ceiling = in_own_process("the process of the resident ceiling", measure_ceiling, observed.prepared)
        if options.compare_in_process:
            with startup.phase("making the same steps in one process"):
                arguments = observed.prepared, observed.tokens
                in_process = in_own_process("the process without Ray", run_in_process, *arguments)
    return Measured(observed.prepared.config, observed, summary.rows, busy, ceiling, in_process)


def _train(config: TrainConfig) -> tuple[Observed, TrainSummary]:
    seen: list[Observed] = []
    summary = Trainer(config).fit(lambda job, crew: seen.append(_observe(job, crew)))
    return seen[-1], summary


def _observe(job: Job, crew: Crew) -> Observed:
    on_gpu = job.prepared.plan.device == "cuda"
    return Observed(
        prepared=job.prepared,
        tokens=job.tokens,
        kernel_names=tuple(crew.kernel_names),
        pss_bytes=pss_of_run(crew.pids),
        device_memory=device_memory(crew.pids["GPU worker"]) if on_gpu else DeviceMemory(None, "the device is the CPU"),
    )
