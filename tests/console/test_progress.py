"""Lines and bar: what is shown, how often, and the time left."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest

from megatrain_ray.console.progress import TimeLeft, describe_split, make_progress


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
    }
    return given | changes


def shown_steps(steps: int, completed: int) -> list[int]:
    stream = io.StringIO()
    with make_progress(steps, completed, stream) as view:
        for step in range(completed + 1, steps + 1):
            view.update(row(step))
    return [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()]


def test_a_line_says_step_loss_speed_and_time_left() -> None:
    stream = io.StringIO()
    with make_progress(10, 3, stream) as view:
        view.update(row(4))
        view.update(row(5, loss=math.nan, skipped=True, bad_parameter="lm_head.weight"))
    assert stream.getvalue().splitlines() == [
        "step 4/10  loss 2.5000  12.3k tokens/s  12s left  2 s: compute 1.24, optimizer 0.5, h2d 0.25",
        "step 5/10  loss nan  12.3k tokens/s  skipped: the gradient of lm_head.weight is not finite  10s left  "
        "2 s: compute 1.24, optimizer 0.5, h2d 0.25",
    ]


def test_where_steps_went_in_the_mean() -> None:
    rows = [row(1), row(2, step_s=4.0, exposed_s={"h2d": 0.25, "d2h": 0.0, "optimizer": 3.5, "loss": 0.25})]
    assert describe_split(rows) == "3 s: compute 0.62, optimizer 2, h2d 0.25, loss 0.13"
    assert describe_split([row(1, exposed_s={"python": 2.5})]) == "2 s: compute 0, python 2.5"


EVALUATION = {"step": 3, "eval_loss": 2.5, "perplexity": 12.1825, "eval_tokens": 12345, "eval_s": 2.0}


def test_an_evaluation_is_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with make_progress(10, 3, stream) as view:
        view.evaluating(1, 2)
        view.evaluated(EVALUATION)
        view.evaluated(EVALUATION | {"eval_loss": None, "perplexity": None})
    assert stream.getvalue().splitlines() == [
        "after step 3  eval_loss 2.5000  perplexity 12.182  12.3k tokens in 2s",
        "after step 3  eval_loss nan  perplexity nan  12.3k tokens in 2s",
    ]
    terminal = Terminal()
    with make_progress(10, 3, terminal) as view:
        view.evaluating(1, 2)
        view.evaluated(EVALUATION)
    assert "evaluating 1/2" in terminal.getvalue()
    assert "after step 3  eval_loss 2.5000" in terminal.getvalue()


def test_a_short_run_shows_every_step_and_a_long_one_about_fifty() -> None:
    assert shown_steps(50, 0) == list(range(1, 51))
    assert shown_steps(1001, 100) == [101, *range(114, 1001, 19), 1001]


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
    shown = stream.getvalue()
    assert "step 2/2" in shown.replace("\x1b[0m", "")
    assert "loss 2.5000" in shown
