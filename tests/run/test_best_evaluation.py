"""The evaluation with the least loss, and what ends a run early."""

from __future__ import annotations

from typing import Any

from megatrain_ray.run.best_evaluation import best_evaluation, describe_harm, num_without_better, why_ended_early


def rows(*losses: float | None) -> list[dict[str, Any]]:
    return [{"step": 10 * number, "eval_loss": loss} for number, loss in enumerate(losses)]


def test_the_best_is_the_earliest_of_the_least_and_none_before_the_first_update() -> None:
    assert best_evaluation([]) is None
    assert best_evaluation(rows(0.5)) is None
    assert best_evaluation(rows(0.5, None)) is None
    assert best_evaluation(rows(0.5, 3.0, 2.0, None, 2.0)) == {"step": 20, "eval_loss": 2.0}
    assert best_evaluation(rows(0.5, 3.0, 2.0, 2.5), [10, 30, 40]) == {"step": 30, "eval_loss": 2.5}


def test_evaluations_that_are_no_better_are_counted_from_the_best_on() -> None:
    assert [num_without_better(rows(*losses)) for losses in ([], [1.0], [1.0, 3.0], [1.0, 3.0, 3.0])] == [0, 0, 0, 1]
    assert num_without_better(rows(1.0, 3.0, 4.0, None)) == 2
    assert num_without_better(rows(1.0, 3.0, 4.0, 2.9)) == 0
    assert num_without_better(rows(1.0, None, None)) == 2


def test_a_loss_above_that_before_training_is_said() -> None:
    none_better = "no evaluated save is better than the model before training"
    assert describe_harm(rows(1.0)) is describe_harm(rows(3.0, 1.0, 2.0)) is describe_harm(rows(1.0)[:0]) is None
    assert describe_harm(rows(3.0, 2.0, 4.0)) == "held-out loss rose from 3.0000 to 4.0000"
    assert describe_harm(rows(3.0, 5.0, 4.0)) == f"held-out loss rose from 3.0000 to 4.0000; {none_better}"
    assert describe_harm(rows(3.0, None)) == none_better
    assert describe_harm(rows(0.0, 0.0, 0.0)) is None, "nothing was learned, and nothing harmed"
    other_data = rows(3.0, 4.0)
    other_data[1]["eval_tokens"] = 7
    assert describe_harm(other_data) is None


def test_a_run_ends_early_when_patience_is_lost() -> None:
    losing = rows(1.0, 3.0, 4.0, 5.0)
    assert why_ended_early(losing, 2) == (
        "ended early after step 30: no eval_loss of the last 2 evaluations was better than 3.0000 after step 10 "
        "(eval_patience: 2)"
    )
    assert why_ended_early(losing, 3) is None
    assert why_ended_early(losing, None) is None
    assert "no eval_loss of the last 1 evaluations was finite" in str(why_ended_early(rows(1.0, None), 1))


def test_evaluations_of_other_held_out_data_are_not_compared() -> None:
    """A resume with another data.eval_path."""
    before, after = ([row | {"eval_tokens": tokens} for row in rows(0.5, 1.0, 2.0)] for tokens in (100, 300))
    moved = [*before, *({**row, "step": row["step"] + 20, "eval_loss": row["eval_loss"] + 4} for row in after[1:])]
    assert best_evaluation(moved) == moved[-2]
    assert num_without_better(moved) == 1
