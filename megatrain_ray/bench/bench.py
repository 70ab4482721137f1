"""Implements `megatrain bench`: measures the speed of a configuration.

The speed is compared with that of the same layers when nothing has to be moved, and of the same steps without Ray.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_ray.accounting.prediction_check import Comparison
from megatrain_ray.accounting.trace_file import busy_share, find_traces, read_trace
from megatrain_ray.bench.aliased_memory import NOTE, HostMemory, with_aliases
from megatrain_ray.bench.bench_config import BenchOptions
from megatrain_ray.bench.in_process import run_in_process
from megatrain_ray.bench.resident_ceiling import Ceiling, measure_ceiling
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.interrupts import Interrupts
from megatrain_ray.console.logs import say
from megatrain_ray.console.startup import Startup
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.driver.run_context import RunContext
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.errors import MegatrainError
from megatrain_ray.machine.process_memory import GpuMemoryUse, device_memory, pss_of_run
from megatrain_ray.machine.subprocess_call import in_own_process
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.report.measured_starts import compare_starts
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.train_output import TrainOutput
from megatrain_ray.training_run import TrainingRun
from megatrain_ray.units import format_bytes


@dataclass(frozen=True)
class Observed:
    """Holds what was read from the run's processes after its last step.

    tokens: folders of the tokenized data sources.
    kernel_names: names of the update kernels in use.
    update_times: updates of each shard, and seconds of its kernel in them.
    pss_bytes: proportional set size by process and kind of memory.
    """

    run_spec: RunSpec
    tokens: tuple[Path, ...]
    kernel_names: tuple[str, ...]
    update_times: Sequence[tuple[int, float]]
    pss_bytes: Mapping[str, Mapping[str, int]]
    device_memory: GpuMemoryUse


@dataclass(frozen=True)
class BenchResult:
    """Holds the results of a benchmark.

    rows: rows of metrics of all steps; warm-up steps first, a traced step last.
    busy_share: share of the traced step in which the compute stage worked; None without a trace.
    comparison: comparison of the plan with the run; None if there were too few steps.
    ceiling: the resident ceiling; None if it was not asked for.
    in_process: rows like `rows`, of the same steps without Ray; None if they were not asked for.
    """

    observed: Observed
    rows: Sequence[Mapping[str, Any]]
    busy_share: float | None
    comparison: Comparison | None
    ceiling: Ceiling | None
    in_process: Sequence[Mapping[str, Any]] | None


def measure(config: TrainConfig, options: BenchOptions) -> BenchResult:
    """Train, then measure the ceiling and train again in one process, if `options` ask for these.

    What is printed meanwhile goes to standard error; standard output stays empty. Raises what a training raises.
    """
    with redirect_stdout(sys.stderr), Interrupts():
        run = _ObservedRun(config, options.alias_bytes)
        output = run.run()
        observed = run.observed
        _check_updates(output)
        busy = next((busy_share(read_trace(trace)) for trace in find_traces(output.run_dir)), None)
        compared = compare_starts(RunFiles(output.run_dir))
        startup = Startup()
        ceiling = in_process = None
        if options.with_ceiling:
            with startup.phase("measuring the resident ceiling"):
                ceiling = in_own_process("the process of the resident ceiling", measure_ceiling, observed.run_spec)
        if options.compare_in_process:
            with startup.phase("making the same steps in one process"):
                arguments = observed.run_spec, observed.tokens
                in_process = in_own_process("the process without Ray", run_in_process, *arguments)
    comparison = compared[-1] if compared else None
    return BenchResult(observed, output.rows, busy, comparison, ceiling, in_process)


class _ObservedRun(TrainingRun):
    """Trains, and observes the processes after the last step. Layers may share host memory in turn."""

    observed: Observed  # exists when training has ended

    def __init__(self, config: TrainConfig, alias_bytes: int | None) -> None:
        super().__init__(config)
        self._alias_bytes = alias_bytes

    def _prepare(self, config: TrainConfig, machine: Machine, source: ModelSource) -> RunSpec:
        run_spec = super()._prepare(config, machine, source)
        if self._alias_bytes is None:
            return run_spec
        run_spec = with_aliases(run_spec, self._alias_bytes)
        memory = HostMemory.of(run_spec)
        held, planned = format_bytes(memory.held_bytes), format_bytes(memory.planned_bytes)
        say(f"{NOTE}; host memory takes {held} where the plan has {planned}")
        return run_spec

    def _at_end(self, context: RunContext, crew: WorkerGroup) -> None:
        self.observed = _observe(context, crew)


def _check_updates(output: TrainOutput) -> None:
    """Raise MegatrainError if updates were skipped: such steps are faster than any step that trains."""
    if skipped := [row["step"] for row in output.rows if row["skipped"]]:
        raise MegatrainError(
            f"the updates of steps {skipped} were skipped, since gradients were not finite: their speed would be that "
            "of steps without updates; lower train.lr, or start from other weights"
        )


def _observe(context: RunContext, crew: WorkerGroup) -> Observed:
    plan = context.run_spec.plan
    on_gpu = plan.device == "cuda"
    return Observed(
        run_spec=context.run_spec,
        tokens=context.tokens,
        kernel_names=tuple(crew.kernel_names),
        update_times=crew.update_times(),
        pss_bytes=pss_of_run(crew.pids),
        device_memory=device_memory(crew.pids["GPU worker"]) if on_gpu else GpuMemoryUse(None, "the device is the CPU"),
    )
