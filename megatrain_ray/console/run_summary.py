"""Summarizes a training that has ended: how long it took, how fast it was, what it waited for."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatrain_ray.accounting.prediction_check import Rows, compare
from megatrain_ray.console.progress import describe_evaluation
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.report import less_precise
from megatrain_ray.units import format_bytes, format_count, format_duration, format_quantity

SHOWN_WAITS = 3
LAST_STEPS = 10  # steps at a run's end whose losses are compared with the first one
CLEAR_RISE = 1.1  # times the first loss: batches differ by less
LEAST_RISE = 0.001  # beyond that: below, losses of 0 differ by rounding


def summarize(
    rows: Rows, run_dir: Path, evaluations: Rows = (), plan: Plan | None = None,
    best_save: int | None = None, harm: str | None = None, *, chats: bool = False,
    generates: bool = True, has_save: bool = True,
) -> Iterator[str]:  # fmt: skip
    """Yield the lines of the summary.

    `rows` are of one process. Its first step includes compilation and counts in no median. `evaluations` are of the
    whole run. `plan` is that of these steps; None if it cannot be read.
    `best_save` is the step of the save with the least held-out loss. `harm` says that training raised that loss.
    `chats`: whether the model learned chats. `generates`: whether it is no reward model. `has_save`: whether some save
    is there.
    """
    if rows:
        yield from _describe_steps(rows)
        yield from _describe_disk(rows, plan)
    if rows and plan:
        yield from less_precise(plan)
    if evaluations:
        yield from _describe_evaluations(evaluations)
    if harm := harm if evaluations else _describe_rise(rows):
        yield f"warning   {harm}; a lower train.lr may help"
    if has_save and (rows or evaluations):
        asked, named = "--chat" if chats else '"PROMPT"', shlex.quote(str(run_dir))
        first = f"megatrain generate {named} {asked}, " if generates else ""
        yield f"next      {first}megatrain export {named} OUT_DIR"
    if evaluations and best_save not in (None, evaluations[-1]["step"]):
        yield f"          with --best: the save of step {best_save}, the least eval_loss of those that are saved"


def _describe_steps(rows: Rows) -> Iterator[str]:
    usual = rows[1:] or rows
    steps_s = [row["step_s"] for row in usual]
    total_s = sum(row["step_s"] for row in rows)
    spread = f", median {statistics.median(steps_s):.3g} s, slowest {max(steps_s):.3g} s" if len(usual) > 1 else ""
    yield f"time      {format_duration(total_s)} in {format_quantity(len(rows), 'step')}{spread}"
    speed = statistics.median(row["tokens_per_s"] for row in usual)
    tflops = statistics.median(row["model_tflops"] for row in usual)
    yield f"speed     {format_count(speed)} tokens/s, {tflops:.3g} model TFLOPS"
    exposed_s = {cause: sum(row["exposed_s"][cause] for row in usual) for cause in usual[0]["exposed_s"]}
    yield f"waited    {waits(exposed_s, sum(steps_s))}"
    hbm, host = (max(row[key] for row in rows) for key in ("hbm_peak_bytes", "host_bytes"))
    yield f"memory    {format_bytes(hbm)} of the device at most, {format_bytes(host)} of shared host memory"
    if skipped := sum(row["skipped"] for row in rows):
        yield f"skipped   {skipped} updates whose gradient was not finite"


def _describe_disk(rows: Rows, plan: Plan | None) -> Iterator[str]:
    """Yield a line on the disk traffic, if the plan has something on disk."""
    found = plan and compare(plan, rows)
    if found and (moved := found.term("disk traffic")):
        measured, planned = (format_bytes(int(num_bytes)) for num_bytes in (moved.measured, moved.predicted))
        measured_rate, _ = found.disk_rates
        rate = f", {measured_rate / 1e9:.3g} GB/s while it was at work" if measured_rate else ""
        yield f"disk      {measured} read and written a step, {planned} planned{rate}"


def _describe_evaluations(rows: Rows) -> Iterator[str]:
    finite = [row for row in rows if row["eval_loss"] is not None]
    best = min(finite, key=lambda row: row["eval_loss"], default=None)
    yield f"held out  {describe_evaluation(rows[-1])}"
    if best is not None and best is not rows[-1]:
        when = f"after step {best['step']}" if best["step"] else "before training"
        yield f"          best: eval_loss {best['eval_loss']:.4f} {when}"


def _describe_rise(rows: Rows) -> str | None:
    """Return in words that the training loss rose clearly: all of the last steps are far above the run's first one.

    That of a policy says nothing: it depends on the advantages of the answers that a batch has.
    """
    if any("ratio_max" in row for row in rows):
        return None
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    last = losses[-min(LAST_STEPS, len(losses) // 2) :]
    if len(losses) < 2 or rows[0]["step"] != 1 or min(last) <= CLEAR_RISE * losses[0] + LEAST_RISE:
        return None
    return f"training loss rose from {losses[0]:.4f} to {losses[-1]:.4f}"


def waits(exposed_s: Mapping[str, float], total_s: float) -> str:
    """Return exposed time by cause as shares of the total, largest first, at most `SHOWN_WAITS` of them."""
    largest = sorted(exposed_s.items(), key=lambda item: -item[1])[:SHOWN_WAITS]
    shares = [f"{cause} {share:.1%}" for cause, waited_s in largest if (share := waited_s / total_s) >= 0.001]
    return f"{', '.join(shares)} of the time" if shares else "for nothing"
