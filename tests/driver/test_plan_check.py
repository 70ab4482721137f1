"""When the driver compares a plan with its run, what it says, and that nothing of it ends or holds up a training."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain_ray.driver import plan_check
from megatrain_ray.driver.plan_check import PlanCheck
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.run.run_history import read_history
from tests.support.planned_steps import PROFILE, measured, planned

CREW: Any = SimpleNamespace(pids={"optimizer shard 0": 7}, check=lambda: None)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_check, "pss_of_run", lambda pids: {"driver": {"private": 3 << 30}})


def checked(plan: Plan, folder: Path, rows: list[dict[str, Any]]) -> PlanCheck:
    """After these rows, each with time to look up memory."""
    check = PlanCheck(plan, folder)
    for row in rows:
        check.ended(CREW, row)
        check.close()
    return check


def test_it_compares_after_three_usual_steps_then_twice_as_many_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int | None]] = []
    monkeypatch.setattr(
        plan_check, "compare", lambda plan, rows, pss_bytes: compared.append((rows[-1]["step"], pss_bytes))
    )
    plan = planned(PROFILE)
    check = checked(plan, tmp_path, measured(plan, PROFILE, count=20))
    assert [step for step, _ in compared] == [4, 7, 13]
    check.finish(CREW)
    assert compared[-1] == (21, 3 << 30)
    (memory,) = read_history(tmp_path)
    assert (memory["what"], memory["pss_bytes"]) == ("memory", 3 << 30)


def test_a_warning_comes_once_while_it_stays_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(PROFILE)
    check = checked(plan, tmp_path, measured(plan, PROFILE, count=7, slower=1.5))
    assert capsys.readouterr().err.count("warning: predicted ") == 1
    check.finish(CREW)
    assert "warning" not in capsys.readouterr().err


def test_what_is_right_is_in_the_log_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    plan = planned(PROFILE)
    with caplog.at_level(logging.INFO):
        checked(plan, tmp_path, measured(plan, PROFILE))
    assert any(message.startswith("predicted ") for message in caplog.messages)
    assert capsys.readouterr().err == ""


def test_what_cannot_be_predicted_or_written_ends_no_run(tmp_path: Path) -> None:
    plan = planned(PROFILE)
    for odd, folder in ((plan, tmp_path / "gone"), (replace(plan, prediction=None), tmp_path)):
        checked(odd, folder, measured(plan, PROFILE)).finish(CREW)


def test_a_process_that_has_just_died_leaves_host_memory_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_dead(pids: object) -> dict[str, dict[str, int]]:
        raise ProcessLookupError

    monkeypatch.setattr(plan_check, "pss_of_run", of_dead)
    plan = planned(PROFILE)
    checked(plan, tmp_path, measured(plan, PROFILE)).finish(CREW)
    assert read_history(tmp_path) == ()


def test_a_step_at_which_nothing_is_compared_computes_nothing(tmp_path: Path) -> None:
    """The driver's thread goes on at once."""
    plan = planned(PROFILE)
    rows = measured(plan, PROFILE, count=1)
    check = checked(plan, tmp_path, rows)
    check._next = 1 << 30
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        check.ended(None, rows[-1])  # type: ignore[arg-type]
    finally:
        sys.setprofile(None)
    assert called == ["ended"]
