"""Lines and bar: what is shown, how often, and the time left."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest

from megatrain_ray.console import progress
from megatrain_ray.console.progress import LineTimes, TimeLeft, describe_split, make_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(step: int, **changes: Any) -> dict[str, Any]:
    exposed_s = {"h2d": 0.25, "d2h": 0.0, "optimizer": 0.5, "loss": 0.009}
    given = {
        "step": step,
        "loss": 2.5,
        "tokens_per_s": 12345.0,
        "step_s": 2.0,
        "exposed_s": exposed_s,
        "skipped": False,
        "epoch": step / 3,
        "grad_norm": 0.875,
        "lr": 1e-5,
    }
    return given | changes


def shown_steps(steps: int, completed: int, every: int | str | None = None, step_s: float = 0.0) -> list[int]:
    """Return the steps that have a line, if each of them takes `step_s` seconds on a clock of its own."""
    now = [0.0]
    times = LineTimes(steps, completed, every, lambda: now[0])
    shown = []
    for step in range(completed + 1, steps + 1):
        now[0] += step_s
        if times.is_due(step):
            shown.append(step)
    return shown


def test_a_line_says_step_epoch_loss_norm_rate_speed_and_time_left() -> None:
    stream = io.StringIO()
    with make_progress(10, 3, stream) as view:
        view.update(row(4))
        view.update(row(5, loss=math.nan, skipped=True, bad_parameter="lm_head.weight"))
    assert stream.getvalue().splitlines() == [
        "step 4/10  epoch 1.33  loss 2.5000  norm 0.875  lr 1e-05  12.3k tokens/s  12s left  "
        "2 s: compute 1.24, optimizer 0.5, h2d 0.25",
        "step 5/10  epoch 1.67  loss nan  norm 0.875  lr 1e-05  12.3k tokens/s  "
        "skipped: the gradient of lm_head.weight is not finite  10s left  2 s: compute 1.24, optimizer 0.5, h2d 0.25",
    ]


def test_where_steps_went_in_the_mean() -> None:
    rows = [row(1), row(2, step_s=4.0, exposed_s={"h2d": 0.25, "d2h": 0.0, "optimizer": 3.5, "loss": 0.25})]
    assert describe_split(rows) == "3 s: compute 0.62, optimizer 2, h2d 0.25, loss 0.13"
    assert describe_split([row(1, exposed_s={"python": 2.5})]) == "2 s: compute 0, python 2.5"


EVALUATION = {"step": 3, "eval_loss": 2.5, "perplexity": 12.1825, "eval_tokens": 12345, "eval_s": 2.0}


def test_an_evaluation_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one has more."""
    stream = io.StringIO()
    with make_progress(10, 3, stream) as view:
        view.advance("evaluating", 1, 2, 3400.0)
        view.evaluated(EVALUATION)
        view.evaluated(EVALUATION | {"eval_loss": None, "perplexity": None})
        view.evaluated(EVALUATION | {"eval_loss": -1e-9})
    assert stream.getvalue().splitlines() == [
        "after step 3  eval_loss 2.5000  perplexity 12.182  12.3k tokens in 2s",
        "after step 3  eval_loss nan  perplexity nan  12.3k tokens in 2s",
        "after step 3  eval_loss 0.0000  perplexity 12.182  12.3k tokens in 2s",
    ]
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    view.advance("evaluating", 1, 2, 3400.0)
    assert stream.getvalue().splitlines()[3:] == ["evaluating 1/2  3.40k tokens/s"]
    terminal = Terminal()
    with make_progress(10, 3, terminal) as view:
        view.advance("evaluating", 1, 2, 3400.0)
        view.evaluated(EVALUATION)
    assert "evaluating 1/2" in terminal.getvalue()
    assert "after step 3  eval_loss 2.5000" in terminal.getvalue()


def test_a_short_run_shows_every_step_and_a_long_one_about_fifty() -> None:
    assert shown_steps(50, 0) == list(range(1, 51))
    assert shown_steps(1001, 100) == [101, *range(114, 1001, 19), 1001]


def test_slow_steps_have_a_line_a_minute() -> None:
    assert shown_steps(1000, 0, step_s=20.0)[:5] == [1, 4, 7, 10, 13]
    assert shown_steps(1000, 0, step_s=90.0) == list(range(1, 1001))


def test_lines_come_every_so_many_steps_or_seconds() -> None:
    assert shown_steps(100, 5, 30, step_s=1000.0) == [6, 30, 60, 90, 100]
    assert shown_steps(20, 0, 1) == list(range(1, 21))
    assert shown_steps(20, 0, "30s", step_s=4.0) == [1, 9, 17, 20]
    assert shown_steps(5, 0, "0.5 s", step_s=1.0) == [1, 2, 3, 4, 5]


def test_the_first_step_of_a_process_does_not_count_for_the_time_left() -> None:
    left = TimeLeft(100)
    assert left.after(row(1, step_s=60.0)) == "1h 39m"
    assert left.after(row(2, step_s=1.0)) == "1m 38s"
    assert left.after(row(3, step_s=3.0)) == "3m 14s"


@pytest.mark.parametrize("completed", [0, 1])
def test_a_terminal_gets_a_bar(completed: int) -> None:
    stream = Terminal()
    with make_progress(2, completed, stream) as view:
        view.update(row(2))
    shown = stream.getvalue().replace("\x1b[0m", "")
    assert shown.count("step 2/2") == 2, "the bar, and a line that stays"
    assert "loss 2.5000" in shown
    assert "2 s: compute 1.24, optimizer 0.5, h2d 0.25\n" in shown.replace("\r", "")
