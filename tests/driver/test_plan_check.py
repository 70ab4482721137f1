"""When the driver compares a plan with its run, what it says, and that nothing of it ends or holds up a training."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from megatrain_ray.accounting.gpu_work import GpuWork
from megatrain_ray.accounting.measured_file import read_comparisons
from megatrain_ray.accounting.shard_work import ShardWork
from megatrain_ray.crew.work_calls import WorkCalls
from megatrain_ray.driver import observers
from megatrain_ray.driver.observers import PlanCheck
from megatrain_ray.engine.plan.plan import Plan
from tests.support.planned_steps import PROFILE, measured, planned


class Shards:
    """Stands in for a crew of a GPU worker and a shard, which have done a step's work each time they are asked."""

    def __init__(self, update_s: float) -> None:
        self.pids = {"optimizer shard 0": 7}
        self._update_s = update_s
        self.num_asked = 0

    def check(self) -> None: ...

    def work(self) -> WorkCalls:
        """Return the work so far, with the answers themselves in place of calls."""
        self.num_asked += 1
        shard = ShardWork(7, self.num_asked, self._update_s * self.num_asked)
        return WorkCalls([shard], [GpuWork(self.num_asked)])


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda calls, timeout: calls)
    monkeypatch.setattr(observers, "pss_of_run", lambda pids: {"driver": {"private": 3 << 30}})


def checked(plan: Plan, folder: Path, rows: list[dict[str, Any]], shards: Any) -> PlanCheck:
    """After these rows, each with time to look."""
    check = PlanCheck(plan, folder)
    for row in rows:
        check.ended(shards, row)
        check.close()
    return check


def test_it_looks_after_three_usual_steps_then_twice_as_many_and_at_the_end(tmp_path: Path) -> None:
    plan = planned(PROFILE)
    rows, work = measured(plan, PROFILE, count=20)
    shards = Shards(work.update_s)
    check = checked(plan, tmp_path, rows[:3], shards)
    assert shards.num_asked == 1  # after the second step
    assert read_comparisons(tmp_path) == ()
    for number, asked in ((4, 2), (6, 2), (7, 3), (12, 3), (13, 4), (21, 4)):
        shards = Shards(work.update_s)
        check = checked(plan, tmp_path, rows[:number], shards)
        assert shards.num_asked == asked, number
    check.finish(shards)  # type: ignore[arg-type]
    assert shards.num_asked == 5
    (found,) = read_comparisons(tmp_path)
    assert (found.first_step, found.last_step, found.plan_sha256) == (1, 21, plan.sha256)
    told = {term.name: term.measured for term in found.terms}
    assert told["host"] == 3 << 30
    assert told["updates"] == pytest.approx(work.update_s)


def test_a_warning_comes_once_while_it_stays_the_same_and_again_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(PROFILE)
    rows, work = measured(plan, PROFILE, count=7, slower=1.5)
    shards = Shards(work.update_s)
    check = checked(plan, tmp_path, rows, shards)
    assert capsys.readouterr().err.count("warning: predicted ") == 1
    check.finish(shards)  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("warning: predicted ") == 1


def test_what_is_right_is_in_the_log_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    plan = planned(PROFILE)
    rows, work = measured(plan, PROFILE)
    with caplog.at_level(logging.INFO):
        checked(plan, tmp_path, rows, Shards(work.update_s))
    assert any(message.startswith("predicted ") for message in caplog.messages)
    assert capsys.readouterr().err == ""


def test_nothing_that_fails_here_ends_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = planned(PROFILE)
    rows, work = measured(plan, PROFILE)
    checked(plan, tmp_path / "gone", rows, Shards(work.update_s))
    assert "the plan was not compared with the run" in caplog.text
    unpredicted = Shards(work.update_s)
    checked(replace(plan, prediction=None), tmp_path, rows, unpredicted).finish(unpredicted)  # type: ignore[arg-type]
    assert unpredicted.num_asked == 0


def test_a_process_that_has_just_died_leaves_host_memory_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_dead(pids: object) -> dict[str, dict[str, int]]:
        raise ProcessLookupError

    monkeypatch.setattr(observers, "pss_of_run", of_dead)
    plan = planned(PROFILE)
    rows, work = measured(plan, PROFILE)
    checked(plan, tmp_path, rows, Shards(work.update_s))
    (found,) = read_comparisons(tmp_path)
    assert found.term("host") is None and found.term("updates") is not None


def test_a_step_at_which_nothing_is_looked_up_asks_nobody_and_computes_nothing(tmp_path: Path) -> None:
    """The driver's thread goes on at once."""
    plan = planned(PROFILE)
    rows, work = measured(plan, PROFILE, count=1)
    check = checked(plan, tmp_path, rows, Shards(work.update_s))
    check._next = 1 << 30
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        check.ended(None, rows[-1])  # type: ignore[arg-type]
    finally:
        sys.setprofile(None)
    assert called == ["ended"]
