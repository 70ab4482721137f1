"""Learning rates: the shape of each schedule, and that the reference, which has its own formula, agrees exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from megatrain_ray.engine.optimizer.adamw import Schedule, learning_rate
from tests.support.reference import reference_learning_rate


def rates(schedule: Schedule, **changes: Any) -> list[float]:
    settings = {"peak": 1e-3, "min_lr": 1e-4, "steps": 10, "warmup_steps": 4} | changes
    return [learning_rate(s, schedule=schedule, **settings) for s in range(1, settings["steps"] + 1)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_is_linear_and_reaches_the_peak(schedule: Schedule) -> None:
    assert rates(schedule)[:5] == [1e-3 * 1 / 4, 1e-3 * 2 / 4, 1e-3 * 3 / 4, 1e-3, 1e-3]


def test_decay_runs_from_the_peak_towards_the_minimum_over_the_rest() -> None:
    assert rates("linear")[4:] == pytest.approx([1e-3 - 9e-4 * k / 6 for k in range(6)])
    assert rates("cosine")[4:] == pytest.approx([1e-4 + 9e-4 * (1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)])
    assert rates("constant")[4:] == [1e-3] * 6


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 2])
def test_no_update_is_lost_to_a_rate_of_zero(schedule: Schedule, warmup_steps: int) -> None:
    for steps in (2, 3, 7):
        assert min(rates(schedule, min_lr=0.0, steps=steps, warmup_steps=warmup_steps)) > 0


def test_a_run_may_end_within_its_warm_up() -> None:
    assert rates("cosine", steps=4) == [1e-3 * k / 4 for k in (1, 2, 3, 4)]
    assert rates("cosine", steps=1, warmup_steps=0) == [1e-3]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_reference_agrees_to_the_last_bit(schedule: Schedule) -> None:
    for peak, min_lr, steps, warmup in [(1e-3, 0.0, 97, 0), (3e-4, 3e-5, 1000, 37), (0.1, 0.1, 5, 5)]:
        for step in range(1, steps + 1):
            ours = learning_rate(step, peak=peak, min_lr=min_lr, steps=steps, warmup_steps=warmup, schedule=schedule)
            assert ours == reference_learning_rate(step, peak, min_lr, steps, warmup, schedule)


@pytest.mark.parametrize("warmup_steps", [0, 1, 4, 10])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warm_up_from_zero_is_that_of_transformers(schedule: Schedule, warmup_steps: int) -> None:
    name = "constant_with_warmup" if schedule == "constant" else schedule
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs, scheduler = [], get_scheduler(name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=10)
    for _ in range(10):
        theirs += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert rates(schedule, min_lr=0.0, warmup_steps=warmup_steps, from_zero=True) == pytest.approx(theirs, abs=1e-18)
