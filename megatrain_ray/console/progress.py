"""Shows the progress of a training: a bar on a terminal, lines anywhere else."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress

from megatrain_ray.console.logs import show
from megatrain_ray.units import format_count, format_duration

MAX_LINES = 50  # about so many lines are printed per run, where the output is no terminal
SMALLEST_SHARE = 0.005  # smallest share of a step that is listed
RECENT_STEPS = 20  # newest steps whose mean time predicts the remaining time
BAR_COLUMNS = (
    TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(), TaskProgressColumn(),
    TextColumn("{task.fields[status]}"),
)  # fmt: skip


class BarView:
    """Shows progress as a bar that is redrawn in place."""

    def __init__(self, bar: RichProgress, steps: int, completed: int) -> None:
        self._bar = bar
        self._left = TimeLeft(steps)
        self._task = bar.add_task("train", total=steps, completed=completed, status="starting")

    def update(self, row: Mapping[str, Any]) -> None:
        self._bar.update(self._task, completed=row["step"], status=f"{_summary(row)}  {self._left.after(row)} left")

    def evaluating(self, done: int, total: int) -> None:
        self._bar.update(self._task, status=f"evaluating {done}/{total}")

    def evaluated(self, row: Mapping[str, Any]) -> None:
        self._bar.console.print(describe_evaluation(row), highlight=False)


class LineView:
    """Shows progress as lines: one per step of a short run; of a longer one every n-th step, the first and the last."""

    def __init__(self, stream: TextIO, steps: int, completed: int) -> None:
        self._stream = stream
        self._steps = steps
        self._first = completed + 1
        self._every = max(1, math.ceil((steps - completed) / MAX_LINES))
        self._left = TimeLeft(steps)

    def update(self, row: Mapping[str, Any]) -> None:
        step, left = row["step"], self._left.after(row)
        if step % self._every == 0 or step in (self._first, self._steps):
            show(f"step {step}/{self._steps}  {_summary(row)}  {left} left  {describe_split([row])}", self._stream)

    def evaluating(self, done: int, total: int) -> None:
        """Do nothing: the row of the evaluation follows soon enough."""

    def evaluated(self, row: Mapping[str, Any]) -> None:
        show(describe_evaluation(row), self._stream)


class TimeLeft:
    """Estimates the remaining time from the mean of recent steps, without the first one, which compiles."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._num_rows = 0

    def after(self, row: Mapping[str, Any]) -> str:
        if self._num_rows == 1:
            self._recent.clear()
        self._num_rows += 1
        self._recent.append(row["step_s"])
        return format_duration((self._steps - row["step"]) * sum(self._recent) / len(self._recent))


ProgressView = BarView | LineView


@contextmanager
def make_progress(steps: int, completed: int, stream: TextIO | None = None) -> Iterator[ProgressView]:
    """Yield the view of a run from `completed` to `steps` updates, on standard output if `stream` is None."""
    stream = stream or sys.stdout
    if stream.isatty():
        with RichProgress(*BAR_COLUMNS, console=Console(file=stream)) as bar:
            yield BarView(bar, steps, completed)
    else:
        yield LineView(stream, steps, completed)


def describe_evaluation(row: Mapping[str, Any]) -> str:
    """Return a row of evaluations as one line. A number that is not finite may have been stored as null."""
    loss, perplexity = (math.nan if row[key] is None else row[key] for key in ("eval_loss", "perplexity"))
    return (
        f"after step {row['step']}  eval_loss {loss:.4f}  perplexity {perplexity:.5g}  "
        f"{format_count(row['eval_tokens'])} tokens in {format_duration(row['eval_s'])}"
    )


def describe_split(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean seconds of a step as one line: total, compute, then the compute stage's waits by cause.

    Waits are listed longest first; those below `SMALLEST_SHARE` of a step are left out. `rows`: of metrics.
    """
    step_s = sum(row["step_s"] for row in rows) / len(rows)
    exposed_s = {cause: sum(row["exposed_s"][cause] for row in rows) / len(rows) for cause in rows[0]["exposed_s"]}
    longest = sorted(exposed_s.items(), key=lambda item: -item[1])
    parts = [("compute", max(0.0, step_s - sum(exposed_s.values())))]
    parts += [(cause, waited_s) for cause, waited_s in longest if waited_s >= SMALLEST_SHARE * step_s]
    return f"{step_s:.3g} s: {', '.join(f'{name} {seconds:.3g}' for name, seconds in parts)}"


def _summary(row: Mapping[str, Any]) -> str:
    skipped = f"  skipped: the gradient of {row['bad_parameter']} is not finite" if row["skipped"] else ""
    loss = "no loss: host memory is aliased" if row.get("aliased") else f"loss {row['loss']:.4f}"
    return f"{loss}  {format_count(row['tokens_per_s'])} tokens/s{skipped}"
