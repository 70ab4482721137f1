"""`megatrain refit`: rates that a run measured, in the place of those that its plan was made with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.accounting.prediction_check import Comparison, compare
from megatrain_ray.commands.refit import Refitted, refit, refitted
from megatrain_ray.engine.device.hardware_profile import HardwareProfile
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.errors import ConfigError
from megatrain_ray.report.measured_starts import compare_starts, measured_starts
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_history import History
from megatrain_ray.virtual_clock import SUM_OVER_GPUS
from tests.support.planned_steps import PROFILE, measured, planned, predicted, with_more_on_disk
from tests.support.settings import config

TWICE = 2.0


def compared(plan: Plan, profile: HardwareProfile) -> Comparison:
    found = compare(plan, measured(plan, profile))
    assert found is not None
    return found


def refit_of(plan: Plan, found: Comparison) -> Refitted:
    assert plan.prediction is not None
    return refitted(plan.prediction, found, lambda profile: predicted(plan, profile))


WRONG = {
    "AdamW": replace(PROFILE, adamw_per_s=TWICE * PROFILE.adamw_per_s),
    "disk": replace(PROFILE, disk_bytes_per_s=TWICE * 2e9),
    "compute": replace(
        PROFILE,
        matmul={p: tuple(replace(x, per_s=TWICE * x.per_s) for x in curve) for p, curve in PROFILE.matmul.items()},
        attention=tuple(replace(x, per_s=TWICE * x.per_s) for x in PROFILE.attention),
        device_bytes_per_s=TWICE * PROFILE.device_bytes_per_s,
        launch_s=PROFILE.launch_s / TWICE,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rate_is_found_and_the_next_plan_predicts_the_run(name: str) -> None:
    """What was right stays, and the plan that is made next says what the machine takes for it."""
    spilled = name == "disk"
    plan = planned(WRONG[name], spilled=spilled)
    found = compared(plan, PROFILE)
    assert abs(found.step.error) > 0.1
    done = refit_of(plan, found)
    for mine, true in ((done.profile.adamw_per_s, 1e9), (done.profile.device_bytes_per_s, 4e12)):
        assert mine == pytest.approx(true, rel=0.01)
    assert predicted(plan, done.profile).step_s == pytest.approx(found.step.measured, rel=0.01)
    again = planned(done.profile, spilled=spilled)
    assert again.prediction is not None
    assert again.prediction.step_s == pytest.approx(predicted(again, PROFILE).step_s, rel=0.1)
    if spilled:
        assert done.profile.disk_bytes_per_s == pytest.approx(2e9, rel=0.01)
        assert any(line.startswith("disk          4 → 2 GB/s") for line in done.report)


@pytest.mark.parametrize("link_is_faster", [False, True])
def test_sums_over_gpus_are_left_to_the_link(link_is_faster: bool) -> None:
    """The time of sums over GPUs is subtracted from prediction and measurement.

    If the plan predicted more for the sums than all compute took, nothing is known of products, and their rates stay.
    """
    link = replace(PROFILE, gpu_link_bytes_per_s=1e9)
    wrong = replace(WRONG["compute"], gpu_link_bytes_per_s=1e9)
    plan = planned(wrong, num_gpus=2)
    assert plan.prediction is not None
    sums_s = plan.prediction.compute_s[SUM_OVER_GPUS]
    found = compared(plan, replace(link, gpu_link_bytes_per_s=1e12) if link_is_faster else link)
    done = refit_of(plan, found)
    term = found.term("compute")
    assert term is not None
    assert link_is_faster == (term.measured < sums_s)
    assert done.profile.gpu_link_bytes_per_s == 1e9
    assert done.profile.device_bytes_per_s == pytest.approx(
        wrong.device_bytes_per_s if link_is_faster else 4e12, rel=0.01
    )
    assert any(line.startswith("compute       not timed: ") for line in done.report) == link_is_faster
    if not link_is_faster:
        assert predicted(plan, done.profile).step_s == pytest.approx(found.step.measured, rel=0.01)


def test_a_disk_with_several_rates_keeps_their_proportion() -> None:
    """That of what is packed, and of what is not."""
    right = replace(PROFILE, disk_bytes_per_s=2e9, disk_plain_bytes_per_s=1e9)
    wrong = replace(PROFILE, disk_bytes_per_s=4e9, disk_plain_bytes_per_s=2e9)
    plan = with_more_on_disk(planned(wrong, spilled=True), wrong)
    assert plan.prediction and plan.prediction.profile == wrong
    moved = plan.step.num_sweeps * sum(plan.disk_activations)
    assert plan.prediction.disk_s > (moved + plan.written_bytes) / 4e9
    done = refit_of(plan, compared(plan, right))
    assert done.profile.disk_bytes_per_s == pytest.approx(2e9)
    assert done.profile.disk_plain_bytes_per_s == pytest.approx(1e9)
    assert any(line.startswith("disk          4 → 2 GB/s") for line in done.report)


def test_both_rates_of_updates_are_scaled_where_activations_that_leave_slow_them_partly() -> None:
    wrong = replace(PROFILE, adamw_busy_per_s=TWICE * PROFILE.adamw_busy_per_s)
    plan = planned(wrong)
    assert plan.host_kept_bytes, "updates under a forward seem to be fastest beside copies"
    assert plan.prediction and 0 < (share := plan.prediction.beside_copies) < 1
    done = refit_of(plan, compared(plan, PROFILE))
    assert done.profile.updates_per_s(share) == pytest.approx(PROFILE.updates_per_s(share))
    assert done.profile.adamw_per_s / wrong.adamw_per_s == pytest.approx(
        done.profile.adamw_busy_per_s / wrong.adamw_busy_per_s
    )


def test_copies_are_told_from_waits_for_them_alone() -> None:
    slow = replace(PROFILE, both_bytes_per_s=PROFILE.both_bytes_per_s / 20)
    plan = planned(PROFILE)
    done = refit_of(plan, compared(plan, slow))
    assert done.profile.both_bytes_per_s == pytest.approx(slow.both_bytes_per_s, rel=0.05)
    assert any(line.startswith("copies        × 0.05") for line in done.report)
    hidden = refit_of(plan, compared(plan, PROFILE))
    assert hidden.profile.both_bytes_per_s == PROFILE.both_bytes_per_s
    assert "copies        not timed: computing hid them" in hidden.report


def test_waits_for_uploads_that_others_complete_are_no_rate_of_copies() -> None:
    slow, plan = replace(PROFILE, both_bytes_per_s=PROFILE.both_bytes_per_s / 20), planned(PROFILE)
    found = compared(plan, slow)
    done = refitted(plan.prediction, found, lambda p: predicted(plan, p), gathered=True)  # type: ignore[arg-type]
    assert done.profile.both_bytes_per_s == PROFILE.both_bytes_per_s
    assert "copies        not timed: uploads and all-gathers are waited for together" in done.report


@pytest.mark.parametrize(("optimizer", "h2d"), [(0.0, 0.1), (1.0, 1000.0)], ids=["too short", "too long"])
def test_a_step_that_no_rate_of_copies_explains_leaves_it(optimizer: float, h2d: float) -> None:
    """Updates held the run up less than they take; or copies did longer than all that there are could."""
    slow = replace(PROFILE, adamw_per_s=0.15e9)
    plan = planned(slow)
    first, *usual = measured(plan, slow)
    waits = {**usual[0]["exposed_s"], "h2d": h2d * usual[0]["step_s"]}
    waits["optimizer"] *= optimizer
    longer_s = sum(waits.values()) - sum(usual[0]["exposed_s"].values())
    rows = [{**row, "exposed_s": waits, "step_s": row["step_s"] + longer_s} for row in usual]
    found = compare(plan, [first, *rows])
    assert found is not None
    done = refit_of(plan, found)
    assert done.profile.both_bytes_per_s == slow.both_bytes_per_s
    assert any(line.startswith("copies        not timed: with no rate") for line in done.report)


def test_updates_that_nobody_timed_keep_their_rate() -> None:
    plan = planned(PROFILE)
    found = compare(plan, [{**row, "update_s": 0.0} for row in measured(plan, PROFILE)])
    assert found is not None
    done = refit_of(plan, found)
    assert done.profile.adamw_per_s == PROFILE.adamw_per_s
    assert any("AdamW         not timed" in line for line in done.report)


def made(folder: Path, plan: Plan, rows: Sequence[Mapping[str, Any]] = (), **changes: Any) -> Path:
    """Make a run directory that holds no more than a refit reads."""
    with RunDir.open(config(run_dir=str(folder))) as run:
        run.begin(plan.to_json(), 0)
        for row in rows:
            run.append(row)
    History(folder).begin(**{"step": 0, "steps": 9, "plan_sha256": plan.sha256, **changes})
    return folder


def test_what_cannot_be_refitted_is_named(tmp_path: Path) -> None:
    plan = planned(PROFILE)
    rows = measured(plan, PROFILE)
    short = [{**row, "step_s": row["step_s"] / 1000, "exposed_s": dict.fromkeys(row["exposed_s"], 0.0)} for row in rows]
    old = replace(plan, prediction=plan.prediction and replace(plan.prediction, profile=None))
    for name, folder_plan, folder_rows, changes, message in (
        ("none", plan, [], {}, "nothing was measured: a start must make 4 steps"),
        ("few", plan, rows[:3], {}, "nothing was measured: a start must make 4 steps"),
        ("other", plan, rows, {"plan_sha256": "0" * 64}, "no plan has the SHA-256 0+, which that of steps 1 to 6 had"),
        ("short", plan, short, {}, "ms, which is mostly Ray and Python"),
        ("old", old, rows, {}, "does not hold its rates"),
        ("no time", plan, [{**row, "step_s": 0.0} for row in rows], {}, "are of an earlier version, or were changed"),
        ("no waits", plan, [{"step": row["step"], "step_s": 1.0} for row in rows], {}, "are of an earlier version"),
        ("no number", plan, [{**row, "step_s": math.nan} for row in rows], {}, "are of an earlier version"),
    ):
        folder = made(tmp_path / name, folder_plan, folder_rows, **changes)
        with pytest.raises(ConfigError, match=message):
            refit(folder, tmp_path / "profile.json")
    (tmp_path / "profile.json").write_text("mine")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        refit(tmp_path / "none", tmp_path / "profile.json")
    assert (tmp_path / "profile.json").read_text() == "mine"


def test_a_start_has_the_rows_that_no_later_one_went_back_over(tmp_path: Path) -> None:
    plan = planned(PROFILE)
    folder = made(tmp_path / "run", plan, measured(plan, PROFILE, count=19))
    history = History(folder)
    history.memory(3 << 30)
    for step in (8, 15, 10, 18):
        history.begin(step, 20, plan.sha256)
    history.memory(4 << 30)
    starts = [(start.rows[0]["step"], start.rows[-1]["step"]) for start in measured_starts(RunFiles(folder))]
    assert starts == [(1, 8), (11, 18)], "those with enough steps"
    first, second = compare_starts(RunFiles(folder))
    assert (first.first_step, first.last_step, second.first_step, second.last_step) == (1, 8, 11, 18)
    host = first.term("host")
    assert host and host.measured == 3 << 30
    assert second.term("host") is None
