"""Computes what a plan means for a whole run, and what other machines or settings would change.

`megatrain plan` prints this after the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.device.hardware_profile import TYPICAL_DISK_BYTES_PER_S
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.request import ANY_ROOM, Machine, Request, SpillSpace
from megatrain_ray.errors import CapacityError
from megatrain_ray.planning.run_spec import PlanningProblem
from megatrain_ray.planning.stop_deadline import VARIABLE, stop_wait_s
from megatrain_ray.units import format_bytes, format_count, format_duration, format_seconds

DAY_S = 24 * 60 * 60
SAME = 0.005  # relative change of the speed below which it counts as the same
ENDURANCE_BYTES = 10**15  # rated bytes written of the drive whose lifetime is computed


@dataclass(frozen=True)
class RunTotals:
    """Sums up all steps of a plan: their duration and cost, and how much is written to disk per day.

    steps, tokens, seconds: None if train.epochs is given and the data were not tokenised yet, which a plan does not do.
    cost: in the currency of `price_per_hour`; None without a price or steps.
    saved_bytes_per_day: bytes of saves; None if nothing is saved before the end.
    spilled_bytes_per_day: bytes of spilled state, gradients and activations.
    drive_days: days that a drive rated for ENDURANCE_BYTES written lasts; None if nothing spills.
    stop_wait_s: seconds that a run needs after a signal for its last save, on a typical disk (stop_deadline.py); 0 if
        nothing is saved.
    """

    steps: int | None
    tokens: int | None
    seconds: float | None
    price_per_hour: float | None
    cost: float | None
    saved_bytes_per_day: int | None
    spilled_bytes_per_day: int
    drive_days: float | None
    stop_wait_s: int


def run_of(config: TrainConfig, plan: Plan, price_per_hour: float | None) -> RunTotals | None:
    """Return the totals of the run; None if the plan has no prediction."""
    if plan.prediction is None:
        return None
    steps, step_s = config.train.steps, plan.prediction.step_s
    spilled = plan.written_bytes * DAY_S / step_s
    every = config.save_interval
    saved = plan.save_bytes * DAY_S / (every * step_s) if every and math.isfinite(every) else None
    return RunTotals(
        steps=steps,
        tokens=steps and steps * _tokens(plan),
        seconds=steps and steps * step_s,
        price_per_hour=price_per_hour,
        cost=None if price_per_hour is None or steps is None else price_per_hour * steps * step_s / 3600,
        saved_bytes_per_day=None if saved is None else int(saved),
        spilled_bytes_per_day=int(spilled),
        drive_days=ENDURANCE_BYTES / spilled if spilled else None,
        stop_wait_s=stop_wait_s(plan, config.save_interval, TYPICAL_DISK_BYTES_PER_S, step_s),
    )


def run_lines(config: TrainConfig, plan: Plan, price_per_hour: float | None) -> Iterator[str]:
    """Yield lines on duration and cost of all steps, bytes of saves, time of a stop, and spilled bytes."""
    if (run := run_of(config, plan, price_per_hour)) is None:
        return
    if run.steps == 0:
        yield "run       no updates: train.steps: 0 only evaluates"
        return
    price = "" if run.cost is None else f", {run.cost:.2f} at {run.price_per_hour:g} an hour"
    assert plan.prediction is not None
    speed = f"{format_count(_tokens(plan) / plan.prediction.step_s)} tokens/s"
    if run.tokens is None or run.seconds is None:
        epochs = f"train.epochs: {config.train.epochs:g}"
        yield f"run       {epochs}; their steps are known once `megatrain data` or a run has read the data; {speed}"
    else:
        duration = format_duration(run.seconds)
        yield f"run       {run.steps} steps, {format_count(run.tokens)} tokens in {duration}, {speed}{price}"
    if run.saved_bytes_per_day is not None:
        rate = f"{format_bytes(int(run.saved_bytes_per_day / DAY_S))}/s"
        mirrored = f"; save_mirror keeps up if it takes {rate}" if config.save_mirror else ""
        yield (
            f"saves     one of {format_bytes(plan.save_bytes)} every {config.save_interval} steps: "
            f"{_written(run.saved_bytes_per_day, run.seconds)}{mirrored}"
        )
    if run.stop_wait_s:
        more = f", and {format_bytes(plan.save_bytes)} more for save_mirror" if config.save_mirror else ""
        yield (
            f"stop      up to {run.stop_wait_s} s from a signal to the end of the last save, at "
            f"{TYPICAL_DISK_BYTES_PER_S / 1e9:.2g} GB/s: {VARIABLE}={run.stop_wait_s}{more}"
        )
    if run.drive_days is not None:
        yield (
            f"spilled   {format_bytes(plan.written_bytes)} every step: "
            f"{_written(run.spilled_bytes_per_day, run.seconds)}; a drive rated for 1 PB written lasts "
            f"{run.drive_days:.1f} days"
        )


def _written(bytes_per_day: int, seconds: float | None) -> str:
    """Return what is written in a day, or in the whole run if that is shorter."""
    if seconds is not None and seconds < DAY_S:
        return f"{format_bytes(int(bytes_per_day * seconds / DAY_S))} written in all"
    return f"{format_bytes(bytes_per_day)} written a day"


@dataclass(frozen=True)
class Alternative:
    """Holds the plan that results from one change.

    plan: None if nothing fits.
    """

    change: str
    plan: Plan | None

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the alternative as plain data for JSON."""
        found = {"change": self.change, "fits": self.plan is not None}
        if self.plan is None or (prediction := self.plan.prediction) is None:
            return found
        return found | {
            "step_s": prediction.step_s,
            "tokens_per_s": _tokens(self.plan) / prediction.step_s,
            "model_tflops": prediction.model_tflops,
            "bottleneck": prediction.bottleneck,
        }


def alternatives(problem: PlanningProblem, plan: Plan | None) -> Iterator[Alternative]:
    """Yield the plan itself, then the plan with each change made by itself.

    plan: None if nothing fits.
    """
    yield Alternative("as it is", plan)
    for change, machine, request in _changes(problem.machine, problem.request):
        try:
            yield Alternative(change, replace(problem, machine=machine, request=request).plan())
        except CapacityError:
            yield Alternative(change, None)


def _changes(machine: Machine, request: Request) -> Iterator[tuple[str, Machine, Request]]:
    for factor, name in ((2, "twice"), (0.5, "half")):
        ram = int(factor * machine.ram_bytes)
        yield f"{name} the RAM, {format_bytes(ram)}", replace(machine, ram_bytes=ram), request
        if machine.hbm_bytes is not None:
            hbm = int(factor * machine.hbm_bytes)
            yield f"{name} the GPU's memory, {format_bytes(hbm)}", replace(machine, hbm_bytes=hbm), request
        count = int(factor * request.num_micro_batches)
        if count == factor * request.num_micro_batches:  # an odd number cannot be halved
            tokens = count * request.micro_batch_size * request.num_gpus * request.seq_len
            yield f"{name} the tokens a step, {tokens}", machine, replace(request, num_micro_batches=count)
    disk = _faster_disk(machine.spill)
    name = "a disk for spill.path" if machine.spill is None else "twice the disk's rate"
    yield f"{name}, {disk.bytes_per_s / 1e9:.2g} GB/s", replace(machine, spill=disk), request
    if not request.round_gradients:
        yield "train.grad_dtype=bf16", machine, replace(request, round_gradients=True)


def _faster_disk(spill: SpillSpace | None) -> SpillSpace:
    """Return the disk with twice its rate; without a disk, a typical one of unlimited size."""
    if spill is None:
        return SpillSpace(ANY_ROOM, TYPICAL_DISK_BYTES_PER_S)
    plain = spill.plain_bytes_per_s and 2 * spill.plain_bytes_per_s
    return replace(spill, bytes_per_s=2 * spill.bytes_per_s, plain_bytes_per_s=plain)


def print_alternatives(found: Sequence[Alternative]) -> None:
    """Print a table of the alternatives. Speeds are compared with that of the first one."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("what if", overflow="fold")  # wraps in 80 columns; the others are never cut
    for column in ("s a step", "tokens/s", "TFLOPS", "bound by", ""):
        table.add_column(column, justify="left" if column in ("bound by", "") else "right", no_wrap=True)
    first = found[0].numbers
    for alternative in found:
        numbers = alternative.numbers
        if "step_s" not in numbers:
            table.add_row(alternative.change, "", "", "", "does not fit")
            continue
        speedup = ""
        if alternative is not found[0] and "step_s" in first:
            gain = numbers["tokens_per_s"] / first["tokens_per_s"] - 1
            speedup = f"{gain:+.0%}" if abs(gain) > SAME else "the same"
        table.add_row(
            alternative.change,
            format_seconds(numbers["step_s"]),
            format_count(numbers["tokens_per_s"]),
            f"{numbers['model_tflops']:.3g}",
            numbers["bottleneck"],
            speedup,
        )
    Console().print(table)


def _tokens(plan: Plan) -> int:
    return plan.batch_size * plan.step.seq_len
