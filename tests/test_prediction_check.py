"""What is said when a plan's prediction meets what a run measured."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from megatrain_ray.engine.prediction import Prediction
from megatrain_ray.prediction_check import WAITS, compare, tell

PREDICTION = Prediction(
    rates="a machine",
    is_measured=True,
    step_s=2.0,
    model_tflops=1.0,
    compute_s={"forward": 0.5, "backward": 1.0},
    exposed_s={"optimizer": 0.4, "h2d": 0.1},
    busy_s={"compute": 1.5},
    bottleneck="compute",
    h2d_bytes=0,
    d2h_bytes=0,
)


def rows(step_s: float, count: int = 5, **waits: float) -> list[dict[str, Any]]:
    """The first step compiles; the host's wait for the loss is no wait of the device."""
    exposed = dict.fromkeys((*WAITS, "loss"), 0.0) | {"loss": 0.3} | waits
    usual = {"step_s": step_s, "exposed_s": exposed}
    return [usual | {"step_s": 99.0}, *[usual] * count]


def test_the_term_that_differs_most_is_named() -> None:
    found = compare(PREDICTION, rows(2.5, optimizer=0.9, h2d=0.1))
    assert found is not None
    assert (found.term, found.term_predicted_s, found.term_measured_s) == ("optimizer", 0.4, 0.9)
    assert str(found) == (
        "predicted 2 s a step, measured 2.5 (-20%); most of it in optimizer: 0.4 s predicted, 0.9 measured"
    )
    slow = compare(PREDICTION, rows(3.5, optimizer=0.4, h2d=0.1))
    assert slow is not None
    assert (slow.term, slow.term_predicted_s, slow.term_measured_s) == ("compute", 1.5, 3.0)


def test_too_few_steps_say_nothing() -> None:
    assert compare(PREDICTION, rows(2.0, count=2)) is None


@pytest.mark.parametrize(
    ("prediction", "step_s", "warns"),
    [
        (PREDICTION, 2.1, False),
        (PREDICTION, 2.5, True),
        (replace(PREDICTION, is_measured=False), 2.5, False),  # rates of another machine
    ],
)
def test_what_is_off_by_a_tenth_is_warned_of(
    prediction: Prediction, step_s: float, warns: bool,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with caplog.at_level(logging.INFO):
        tell(prediction, rows(step_s, optimizer=0.4, h2d=0.1))
    assert "predicted 2 s a step, measured" in caplog.messages[0]
    assert ("warning: predicted" in capsys.readouterr().err) is warns
