"""Shows the progress of a training as lines, and on a terminal as a bar below them."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from megatrain_ray.config.values import seconds_of
from megatrain_ray.console.logs import drawing_on, show
from megatrain_ray.escapes import escaped
from megatrain_ray.units import format_count, format_duration

NUM_LINES = 50  # about so many lines are printed per run, unless log.every says otherwise
QUIET_S = 60.0  # and one at least after so many seconds
# Numbers of whole answers in the line of a step, and their columns.
ANSWER_NUMBERS = (
    ("margin", "reward_margin"), ("accuracy", "reward_accuracy"), ("reward", "reward"), ("kl", "kl"),
    ("ratio", "ratio_max"),
)  # fmt: skip
SMALLEST_SHARE = 0.005  # smallest share of a step that is listed
RECENT_STEPS = 20  # newest steps whose mean time predicts the remaining time
BAR_COLUMNS = (
    TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=10), TaskProgressColumn(),
    TextColumn("{task.fields[status]}", table_column=Column(ratio=1, no_wrap=True)),  # cut if the terminal is narrow
)  # fmt: skip


class LineTimes:
    """Decides after which steps a line is printed. The first and the last step of a start always have one."""

    def __init__(
        self, steps: int, completed: int, every: int | str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare for the steps after `completed`. `every`: as log.every."""
        self._ends = (completed + 1, steps)
        self._steps = every if isinstance(every, int) else None
        self._seconds = seconds_of(every) if isinstance(every, str) else math.inf
        if every is None:
            self._steps, self._seconds = max(1, math.ceil((steps - completed) / NUM_LINES)), QUIET_S
        self._clock = clock
        self._last_s = clock()

    def is_due(self, step: int) -> bool:
        """Return whether a line is printed after this step. Call it once after every step."""
        now_s = self._clock()
        by_steps = self._steps is not None and step % self._steps == 0
        if not by_steps and now_s - self._last_s < self._seconds and step not in self._ends:
            return False
        self._last_s = now_s
        return True

    def is_quiet(self) -> bool:
        """Return whether no line was due for QUIET_S seconds; then one is."""
        now_s = self._clock()
        if now_s - self._last_s < QUIET_S:
            return False
        self._last_s = now_s
        return True


class LineView:
    """Shows progress as lines."""

    def __init__(self, stream: TextIO, steps: int, times: LineTimes) -> None:
        self._stream = stream
        self._steps = steps
        self._times = times
        self._left = TimeLeft(steps)

    def update(self, row: Mapping[str, Any]) -> None:
        left = self._left.after(row)
        if self._times.is_due(row["step"]):
            self._print(f"step {row['step']}/{self._steps}  {_summary(row)}  {left} left  {describe_split([row])}")

    def advance(self, work: str, done: int, total: int, tokens_per_s: float) -> None:
        """Show how much of an evaluation or a sampling is done, if its result does not follow soon."""
        if self._times.is_quiet():
            self._print(_advanced(work, done, total, tokens_per_s))

    def evaluated(self, row: Mapping[str, Any]) -> None:
        self._print(describe_evaluation(row))

    def sampled(self, step: int, summary: Mapping[str, Any]) -> None:
        self._print(describe_sampling(step, summary))

    def _print(self, line: str) -> None:
        show(line, stream=self._stream)


class BarView(LineView):
    """Shows lines, and below them a bar that is redrawn in place."""

    def __init__(self, bar: RichProgress, stream: TextIO, steps: int, completed: int, times: LineTimes) -> None:
        super().__init__(stream, steps, times)
        self._bar = bar
        self._task = bar.add_task("train", total=steps, completed=completed, status="starting")

    def update(self, row: Mapping[str, Any]) -> None:
        super().update(row)
        self._bar.update(self._task, completed=row["step"], status=f"{self._left.newest} left  {_summary(row)}")

    def advance(self, work: str, done: int, total: int, tokens_per_s: float) -> None:
        self._bar.update(self._task, status=_advanced(work, done, total, tokens_per_s))

    def _print(self, line: str) -> None:
        self._bar.console.print(escaped(line), highlight=False, markup=False, soft_wrap=True)


class TimeLeft:
    """Estimates the remaining time from the mean of recent steps, without the first one, which compiles."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._num_rows = 0
        self.newest = ""  # what `after` returned last

    def after(self, row: Mapping[str, Any]) -> str:
        if self._num_rows == 1:
            self._recent.clear()
        self._num_rows += 1
        self._recent.append(row["step_s"])
        self.newest = format_duration((self._steps - row["step"]) * sum(self._recent) / len(self._recent))
        return self.newest


@contextmanager
def make_progress(
    steps: int, completed: int, stream: TextIO | None = None, every: int | str | None = None
) -> Iterator[LineView]:
    """Yield the view of a run from `completed` to `steps` updates, on standard output if `stream` is None.

    every: as log.every.
    """
    stream = stream or sys.stdout
    times = LineTimes(steps, completed, every)
    if stream.isatty():
        with RichProgress(*BAR_COLUMNS, console=drawing_on(stream), expand=True) as bar:
            yield BarView(bar, stream, steps, completed, times)
    else:
        yield LineView(stream, steps, times)


def describe_evaluation(row: Mapping[str, Any]) -> str:
    """Return a row of evaluations as one line."""
    return f"after step {row['step']}  {describe_held_out_loss(row)}"


def describe_held_out_loss(row: Mapping[str, Any]) -> str:
    """Return the numbers of a row of evaluations. A number that is not finite may have been stored as null."""
    loss = math.nan if row["eval_loss"] is None else row["eval_loss"]
    quality = _of_answers(row, "eval_")
    if not quality and "perplexity" in row:
        quality = f"  perplexity {math.nan if row['perplexity'] is None else row['perplexity']:.5g}"
    return (
        f"eval_loss {loss:z.4f}{quality}  {format_count(row['eval_tokens'])} tokens in {format_duration(row['eval_s'])}"
    )


def describe_sampling(step: int, summary: Mapping[str, Any]) -> str:
    """Return what metrics have of a sampling (`rollouts` of a row) as one line."""
    rewards = [
        f"{key.removeprefix('reward/')} {value:.3g}" for key, value in summary.items() if key.startswith("reward/")
    ]
    return (
        f"after step {step}  reward {summary['reward']:.4f} ± {summary['reward_std']:.3g} ({', '.join(rewards)})  "
        f"{summary['completion_tokens']:.4g} tokens, {summary['ended']:.0%} ended  "
        f"{format_count(summary['tokens_per_s'])} sampled tokens/s in {format_duration(summary['sampling_s'])}"
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


def _of_answers(row: Mapping[str, Any], prefix: str = "") -> str:
    """Return how clearly answers are preferred, or what became of rollouts, with two blanks before each number."""
    found = [(name, row.get(f"{prefix}{key}")) for name, key in ANSWER_NUMBERS]
    return "".join(f"  {name} {value:.3g}" for name, value in found if value is not None)


def _advanced(work: str, done: int, total: int, tokens_per_s: float) -> str:
    return f"{work} {done}/{total}  {format_count(tokens_per_s)} tokens/s"


def _summary(row: Mapping[str, Any]) -> str:
    skipped = f"  skipped: the gradient of {row['bad_parameter']} is not finite" if row["skipped"] else ""
    loss = "no loss: host memory is aliased" if row.get("aliased") else f"loss {row['loss']:z.4f}"
    return (
        f"epoch {row['epoch']:.3g}  {loss}{_of_answers(row)}  norm {row['grad_norm']:.3g}  lr {row['lr']:.3g}  "
        f"{format_count(row['tokens_per_s'])} tokens/s{skipped}"
    )
