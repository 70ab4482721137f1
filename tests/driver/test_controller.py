"""The run's policy, one tick at a time, and played through against a fake that answers in order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain_ray.driver.policy import Action, Observation, RunPolicy
from megatrain_ray.driver.run_saves import num_saves_to_come


def seen(
    submitted: int, completed: int, saved: int = -1, *, interrupted: bool = False, saving: bool = False,
    missed: bool = False, evaluated: int = -1, evaluating: bool = False, changed: bool = True,
    num_without_better: int = 0,
) -> Observation:  # fmt: skip
    return Observation(
        submitted,
        completed,
        saved,
        interrupted,
        changed,
        saving,
        missed,
        evaluated,
        evaluating,
        num_without_better=num_without_better,
    )


@pytest.mark.parametrize(
    ("policy", "observation", "action"),
    [
        (RunPolicy(10, 0), seen(0, 0), Action.STEP),
        (RunPolicy(10, 0), seen(1, 0), Action.STEP),
        (RunPolicy(10, 0), seen(2, 0), Action.WAIT),
        (RunPolicy(10, 0), seen(10, 9, saving=True), Action.WAIT),
        (RunPolicy(10, 0), seen(10, 10, saving=True), Action.WAIT),
        (RunPolicy(10, 0), seen(10, 10), Action.SAVE),
        (RunPolicy(10, 0), seen(10, 10, 10), Action.STOP),
        (RunPolicy(10, None), seen(10, 10), Action.STOP),
        (RunPolicy(10, 4), seen(4, 3, saving=True), Action.STEP),
        (RunPolicy(10, 4), seen(7, 6, saving=True), Action.WAIT),
        (RunPolicy(10, 4), seen(7, 6, 4), Action.STEP),
        (RunPolicy(10, 4), seen(4, 4, missed=True), Action.STEP),
        (RunPolicy(10, 0), seen(5, 4, interrupted=True), Action.WAIT),
        (RunPolicy(10, 0), seen(5, 5, interrupted=True), Action.SAVE),
        (RunPolicy(10, 0), seen(5, 5, interrupted=True, saving=True), Action.WAIT),
        (RunPolicy(10, None), seen(5, 5, interrupted=True), Action.STOP),
        (RunPolicy(10, 0), seen(5, 5, 5, interrupted=True), Action.STOP),
        (RunPolicy(10, 0), seen(0, 0, interrupted=True), Action.STOP),
        (RunPolicy(10, 0), seen(10, 10, 5, changed=False), Action.STOP),
        (RunPolicy(10, 0), seen(10, 10, changed=False), Action.STOP),
        (RunPolicy(10, 0), seen(7, 7, 5, interrupted=True, changed=False), Action.STOP),
        (RunPolicy(10, 0, 4), seen(0, 0), Action.EVALUATE),
        (RunPolicy(10, 0, 4), seen(0, 0, evaluating=True), Action.WAIT),
        (RunPolicy(10, 0, 4), seen(0, 0, evaluated=0), Action.STEP),
        (RunPolicy(10, 0, 4), seen(4, 3, evaluated=0), Action.WAIT),
        (RunPolicy(10, 0, 4), seen(4, 4, evaluated=0), Action.EVALUATE),
        (RunPolicy(10, 4, 4), seen(4, 4, evaluated=0, saving=True), Action.EVALUATE),
        (RunPolicy(10, 4, 4), seen(4, 4, evaluated=4, saving=True), Action.STEP),
        (RunPolicy(10, 0, 4), seen(10, 10, 10, evaluated=8), Action.EVALUATE),
        (RunPolicy(10, 0, 4), seen(10, 10, 10, evaluated=10), Action.STOP),
        (RunPolicy(10, 0, 4), seen(4, 4, interrupted=True, evaluated=0), Action.SAVE),
        (RunPolicy(10, 0, 4), seen(4, 4, interrupted=True, evaluated=0, evaluating=True), Action.WAIT),
        (RunPolicy(8, 0, 4), seen(12, 12, 12, evaluated=4), Action.STOP),
        (RunPolicy(10, 0, 1, eval_patience=2), seen(4, 4, evaluated=4, num_without_better=1), Action.STEP),
        (RunPolicy(10, 0, 1, eval_patience=2), seen(4, 4, evaluated=4, num_without_better=2), Action.SAVE),
        (RunPolicy(10, 0, 1, eval_patience=2), seen(4, 4, saving=True, evaluated=4, num_without_better=2), Action.WAIT),
        (RunPolicy(10, 0, 1, eval_patience=2), seen(4, 4, 4, evaluated=4, num_without_better=2), Action.STOP),
        (RunPolicy(10, None, 1, eval_patience=2), seen(4, 4, evaluated=4, num_without_better=3), Action.STOP),
    ],
)
def test_one_tick(policy: RunPolicy, observation: Observation, action: Action) -> None:
    assert policy.tick(observation) is action


@pytest.mark.parametrize(
    ("policy", "observation", "saves"),
    [
        (RunPolicy(10, 0), seen(8, 8), False),
        (RunPolicy(10, 0), seen(9, 8), True),
        (RunPolicy(10, None), seen(9, 8), False),
        (RunPolicy(10, 4), seen(3, 3), True),
        (RunPolicy(10, 4), seen(4, 4), False),
        (RunPolicy(10, 4), seen(4, 4, missed=True), True),
        (RunPolicy(10, None), seen(4, 4, missed=True), False),
        (RunPolicy(10, 0, 3, saves_evaluated=True), seen(5, 5), True),
        (RunPolicy(10, 4, 3, saves_evaluated=True), seen(7, 7), True),
        (RunPolicy(10, 4, 3, saves_evaluated=True), seen(6, 6), False),
        (RunPolicy(10, 4, 3), seen(5, 5), False),
    ],
)
def test_which_steps_are_saved(policy: RunPolicy, observation: Observation, saves: bool) -> None:
    assert policy.saves_next(observation) is saves


def play(
    policy: RunPolicy, start: int = 0, interrupt_after: int | None = None, miss: frozenset[int] = frozenset()
) -> tuple[int, list[int]]:
    """Return the steps completed and the saves made when every step succeeds.

    A save ends once the step after it has ended.

    miss: steps whose saves fail the first time.
    """
    submitted = completed = start
    saves, saving, missed, to_miss = ([start] if start else []), None, False, set(miss)
    for _ in range(1000):
        interrupted = interrupt_after is not None and completed >= interrupt_after
        newest = saves[-1] if saves else -1
        seen = Observation(submitted, completed, newest, interrupted, saving=saving is not None, missed=missed)
        match policy.tick(seen):
            case Action.STEP:
                if policy.saves_next(seen):
                    assert saving is None, "one save at a time"
                    saving, missed = submitted + 1, False
                submitted += 1
            case Action.WAIT:
                assert completed < submitted or saving is not None, "waits for nothing"
                if saving is not None and (completed > saving or completed == submitted):
                    missed = saving in to_miss
                    to_miss.discard(saving)
                    saves += [] if missed else [saving]
                    saving = None
                else:
                    completed += completed < submitted
            case Action.SAVE:
                assert completed == submitted and saving is None
                saving, missed = completed, False
            case Action.STOP:
                return completed, saves
    raise AssertionError("the run does not end")


def test_whole_runs() -> None:
    assert play(RunPolicy(10, 0)) == (10, [10])
    assert play(RunPolicy(10, 4)) == (10, [4, 8, 10])
    assert play(RunPolicy(8, 4)) == (8, [4, 8])
    assert play(RunPolicy(5, 1)) == (5, [1, 2, 3, 4, 5])
    assert play(RunPolicy(10, None)) == (10, [])
    assert play(RunPolicy(10, 4), start=4) == (10, [4, 8, 10])
    assert play(RunPolicy(10, 0), interrupt_after=3) == (4, [4])
    assert play(RunPolicy(10, None), interrupt_after=3) == (4, [])


def test_evaluations_come_before_the_first_update_after_every_nth_and_after_the_last() -> None:
    assert evaluations(RunPolicy(10, 4, 4)) == [0, 4, 8, 10]
    assert evaluations(RunPolicy(8, 3, 4)) == [0, 4, 8]
    assert evaluations(RunPolicy(2, None, 5)) == [0, 2]
    assert evaluations(RunPolicy(10, 4, 4), start=4, evaluated=4) == [8, 10]
    assert evaluations(RunPolicy(10, 4, 4), start=4, evaluated=0) == [4, 8, 10], "killed in the one after step 4"
    assert evaluations(RunPolicy(10, 4, 0)) == []


def test_a_run_is_done_when_its_last_evaluation_is_there() -> None:
    policy = RunPolicy(10, 0, 4)
    assert not policy.is_done(seen(8, 8, evaluated=8))
    assert not policy.is_done(seen(10, 10, 10, evaluated=8))
    assert policy.is_done(seen(10, 10, 10, evaluated=10))
    assert RunPolicy(10, 0).is_done(seen(10, 10))
    assert policy.is_done(seen(12, 12, evaluated=4)), "steps were lowered afterwards"


def test_a_run_that_ended_early_is_done_and_goes_on_with_more_patience() -> None:
    rows = [{"step": step, "eval_loss": loss} for step, loss in ((0, 1.0), (2, 3.0), (4, 3.0), (6, 3.5), (8, 2.0))]
    for patience, step, is_done in ((2, 6, True), (3, 6, False), (2, 4, False), (2, 8, False), (None, 6, False)):
        policy = RunPolicy(10, 0, 2, eval_patience=patience)
        assert policy.is_done_after(step, rows) is is_done, (patience, step)


@pytest.mark.parametrize(
    "settings", [(10, 0), (10, 4), (8, 4), (10, 4, 3), (12, 4, 6), (12, 0, 5), (1, 0, 1), (9, 9, 3)]
)
def test_the_saves_to_come_are_counted(settings: tuple[int, ...]) -> None:
    policy = RunPolicy(*settings, saves_evaluated=len(settings) > 2)
    for step in range(policy.steps + 1):
        made = sum(policy.saves_next(seen(later, later)) for later in range(step, policy.steps))
        assert num_saves_to_come(policy, step) == made


def evaluations(policy: RunPolicy, start: int = 0, evaluated: int = -1) -> list[int]:
    """After which steps a run evaluates when everything succeeds at once, saves aside."""
    submitted = completed = start
    made = []
    for _ in range(100):
        match policy.tick(seen(submitted, completed, policy.steps, evaluated=evaluated)):
            case Action.STEP:
                submitted += 1
            case Action.WAIT:
                assert completed < submitted, "waits for nothing"
                completed += 1
            case Action.EVALUATE:
                assert completed == submitted, "no step is under way"
                evaluated = submitted
                made.append(submitted)
            case Action.STOP:
                return made
            case Action.SAVE:
                raise AssertionError("it is saved")
    raise AssertionError("the run does not end")


def test_a_save_that_did_not_come_about_is_made_again() -> None:
    assert play(RunPolicy(14, 5), miss=frozenset({5})) == (14, [9, 10, 14])
    assert play(RunPolicy(10, 0), miss=frozenset({10})) == (10, [10])


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        ({}, Action.SAMPLE),
        ({"sampling": True}, Action.WAIT),
        ({"sampled": 0}, Action.STEP),
        ({"sampled": 0, "submitted": 1}, Action.STEP),
        ({"sampled": 0, "submitted": 2}, Action.WAIT),
        ({"sampled": 0, "submitted": 2, "completed": 1}, Action.WAIT),
        ({"sampled": 0, "submitted": 2, "completed": 2}, Action.SAMPLE),
        ({"sampled": 0, "submitted": 2, "completed": 2, "interrupted": True}, Action.SAVE),
        ({"sampled": 2, "submitted": 3, "completed": 3}, Action.STEP),
        ({"sampled": 6, "submitted": 8, "completed": 8}, Action.SAVE),
        ({"sampled": 8, "submitted": 8, "completed": 8, "saved": 8}, Action.STOP),
    ],
)
def test_rollouts_are_sampled_before_the_steps_that_learn_from_them(changes: dict[str, int], action: Action) -> None:
    values = {"submitted": 0, "completed": 0, "saved": -1, "interrupted": False, **changes}
    assert RunPolicy(8, 0, sample_every=2).tick(Observation(**values)) is action  # type: ignore[arg-type]


def test_a_step_whose_data_are_not_there_is_held_back_and_nothing_else_is() -> None:
    policy = RunPolicy(10, 4, eval_every=4)
    assert policy.tick(replace(seen(3, 3, 0, evaluated=0), held_back=True)) is Action.WAIT
    assert policy.tick(replace(seen(4, 4, 0, evaluated=0), held_back=True)) is Action.EVALUATE
    assert policy.tick(replace(seen(3, 3, 0, evaluated=0, interrupted=True), held_back=True)) is Action.SAVE
    assert policy.tick(replace(seen(10, 10, 10, evaluated=10), held_back=True)) is Action.STOP


def test_an_evaluation_comes_before_a_sampling() -> None:
    policy = RunPolicy(8, 0, eval_every=2, sample_every=2)
    assert policy.tick(Observation(2, 2, -1, interrupted=False, evaluated=0, sampled=0)) is Action.EVALUATE
    assert policy.tick(Observation(2, 2, -1, interrupted=False, evaluated=2, sampled=0)) is Action.SAMPLE
