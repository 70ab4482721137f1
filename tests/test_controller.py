"""The run's policy, one tick at a time, and played through against a fake that answers in order."""

from __future__ import annotations

import pytest

from megatrain_ray.controller import Action, Observation, RunPolicy


def seen(submitted: int, completed: int, saved: int = -1, *, interrupted: bool = False) -> Observation:
    return Observation(submitted, completed, saved, interrupted)


@pytest.mark.parametrize(
    ("policy", "observation", "action"),
    [
        (RunPolicy(10, 0), seen(0, 0), Action.STEP),
        (RunPolicy(10, 0), seen(1, 0), Action.STEP),
        (RunPolicy(10, 0), seen(2, 0), Action.WAIT),
        (RunPolicy(10, 0), seen(10, 9), Action.WAIT),
        (RunPolicy(10, 0), seen(10, 10), Action.SAVE),
        (RunPolicy(10, 0), seen(10, 10, 10), Action.STOP),
        (RunPolicy(10, None), seen(10, 10), Action.STOP),
        (RunPolicy(10, 4), seen(4, 3), Action.WAIT),
        (RunPolicy(10, 4), seen(4, 4), Action.SAVE),
        (RunPolicy(10, 4), seen(4, 4, 4), Action.STEP),
        (RunPolicy(10, 0), seen(5, 4, interrupted=True), Action.WAIT),
        (RunPolicy(10, 0), seen(5, 5, interrupted=True), Action.SAVE),
        (RunPolicy(10, None), seen(5, 5, interrupted=True), Action.STOP),
        (RunPolicy(10, 0), seen(5, 5, 5, interrupted=True), Action.STOP),
        (RunPolicy(10, 0), seen(0, 0, interrupted=True), Action.STOP),
    ],
)
def test_one_tick(policy: RunPolicy, observation: Observation, action: Action) -> None:
    assert policy.tick(observation) is action


def play(policy: RunPolicy, start: int = 0, interrupt_after: int | None = None) -> tuple[int, list[int]]:
    """Steps completed and saves made when every step succeeds."""
    submitted = completed = start
    saves = [start] if start else []
    for _ in range(1000):
        interrupted = interrupt_after is not None and completed >= interrupt_after
        match policy.tick(Observation(submitted, completed, saves[-1] if saves else -1, interrupted)):
            case Action.STEP:
                submitted += 1
            case Action.WAIT:
                completed += 1
                assert completed <= submitted
            case Action.SAVE:
                assert completed == submitted
                saves.append(completed)
            case Action.STOP:
                return completed, saves
    raise AssertionError("the run does not end")


def test_whole_runs() -> None:
    assert play(RunPolicy(10, 0)) == (10, [10])
    assert play(RunPolicy(10, 4)) == (10, [4, 8, 10])
    assert play(RunPolicy(8, 4)) == (8, [4, 8])
    assert play(RunPolicy(10, None)) == (10, [])
    assert play(RunPolicy(10, 4), start=4) == (10, [4, 8, 10])
    assert play(RunPolicy(10, 0), interrupt_after=3) == (4, [4])
    assert play(RunPolicy(10, None), interrupt_after=3) == (4, [])
