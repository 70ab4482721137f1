"""What is said when a prediction meets what a run measured: which term is off, and that good ones say nothing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatrain_ray.accounting.prediction_check import Comparison, compare, warning
from megatrain_ray.engine.device.hardware_profile import HardwareProfile
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.report.measured_starts import comparison_table
from tests.support.planned_steps import PROFILE, measured, planned, with_more_on_disk


def compared(plan: Plan, profile: HardwareProfile, **changes: float) -> Comparison:
    found = compare(plan, measured(plan, profile, **changes))
    assert found is not None
    return found


def warned(plan: Plan, found: Comparison) -> str:
    assert plan.prediction is not None
    return warning(found, plan.prediction, "runs/my x") or ""


def test_a_right_prediction_is_not_warned_of() -> None:
    for plan in (planned(PROFILE), planned(PROFILE, spilled=True)):
        found = compared(plan, PROFILE)
        assert found.step.error == pytest.approx(0)
        assert warned(plan, found) == ""
        assert (found.first_step, found.last_step, found.plan_sha256) == (1, 6, plan.sha256)


def test_too_few_steps_say_nothing() -> None:
    plan = planned(PROFILE)
    assert compare(plan, measured(plan, PROFILE, count=2)) is None


def test_adamw_twice_as_fast_as_it_is_is_named() -> None:
    wrong = replace(PROFILE, adamw_per_s=2 * PROFILE.adamw_per_s)
    plan = planned(wrong)
    text = warned(plan, compared(plan, PROFILE))
    assert "most of it in optimizer" in text
    assert "AdamW made 1 Gparam/s where the plan counts on 2; if the machine was busy" in text
    assert "megatrain refit 'runs/my x' FILE" in text


def test_a_disk_twice_as_fast_as_it_is_is_named() -> None:
    plan = planned(replace(PROFILE, disk_bytes_per_s=4e9), spilled=True)
    text = warned(plan, compared(plan, PROFILE))
    assert "most of it in optimizer" in text
    assert "the disk moved 2 GB/s where the plan counts on 4;" in text


def test_a_disk_that_activations_wait_for_is_named() -> None:
    """The disk is named where waits for copies are what is off, because these have no part of the disk's own."""
    right, wrong = replace(PROFILE, disk_bytes_per_s=1e8), replace(PROFILE, disk_bytes_per_s=2e8)
    plan = with_more_on_disk(planned(wrong), wrong)
    assert not plan.uses_disk
    text = warned(plan, compared(plan, right))
    assert re.search(r"most of it in (h2d|d2h): ", text)
    assert "the disk moved 0.1 GB/s where the plan counts on 0.2;" in text
    assert warned(with_more_on_disk(plan, right), compared(with_more_on_disk(plan, right), right)) == ""
    spilled = planned(PROFILE, spilled=True)
    slow = [
        {**row, "step_s": 9.0, "exposed_s": {**row["exposed_s"], "h2d": 8.0}, "disk_s": 2 * row["disk_s"]}
        for row in measured(spilled, PROFILE)
    ]
    found = compare(spilled, slow)
    assert found is not None
    assert "most of it in h2d" in warned(spilled, found) and "the disk moved" not in warned(spilled, found)


def test_slow_computing_is_named() -> None:
    plan = planned(PROFILE, num_micro_batches=16)
    text = warned(plan, compared(plan, PROFILE, slower=1.5))
    assert "(predicted 33% too little); most of it in compute" in text
    assert "megatrain doctor --measure" in text


def test_a_wait_that_nothing_predicts_is_named_with_its_own_advice() -> None:
    plan = planned(PROFILE)
    assert plan.prediction is not None
    text = warned(plan, compared(plan, PROFILE, data=0.2 * plan.prediction.step_s))
    assert "most of it in data: 0 s predicted" in text
    assert "batches come too late" in text
    assert "refit" not in text


def test_terms_that_make_up_for_each_other_are_warned_of() -> None:
    plan = planned(PROFILE)
    assert plan.prediction is not None
    moved = 0.2 * plan.prediction.step_s
    rows = measured(plan, PROFILE)
    for row in rows:
        row["exposed_s"] = {**row["exposed_s"], "h2d": row["exposed_s"]["h2d"] + moved}
    found = compare(plan, rows)
    assert found is not None
    assert found.step.error == pytest.approx(0)
    assert {term.name for term in found.off(plan.prediction)} == {"compute", "h2d"}


def test_rates_of_another_machine_and_short_steps_are_no_reason_to_warn() -> None:
    plan = planned(PROFILE)
    assert plan.prediction is not None
    slow = compared(plan, PROFILE, slower=1.5)
    guessed = replace(plan, prediction=replace(plan.prediction, is_measured=False))
    assert warned(plan, slow) != ""
    assert warned(guessed, slow) == ""
    far = warned(guessed, compared(plan, PROFILE, slower=5.0))
    assert "(predicted 80% too little)" in far
    assert far.endswith("the rates are built-in ones (megatrain doctor --measure), or other processes use the cores")
    short = replace(slow, terms=tuple(replace(t, measured=t.measured / 100) for t in slow.terms))
    assert short.step.measured < 0.05
    assert warned(plan, short) == ""


def test_more_memory_than_planned_is_named_and_less_is_not() -> None:
    plan = planned(PROFILE)
    rows = measured(plan, PROFILE)
    host = plan.total_bytes(Tier.HOST)
    tensors = rows[0]["hbm_peak_bytes"]
    processes = next(row.num_bytes for row in plan.memory_items if row.name == "processes")
    for hbm, pss, told in (
        (1.04, host, ""),
        (0.5, host // 2, ""),
        (1.07, host, "HBM: planned "),
        (1.0, int(1.05 * host + processes), "host: planned "),
        (1.0, int(1.06 * host), ""),  # what processes take is an estimate, and most of so small a plan
    ):
        found = compare(plan, [{**row, "hbm_peak_bytes": int(hbm * tensors)} for row in rows], pss)
        assert found is not None
        assert warned(plan, found).startswith(told)
        assert bool(warned(plan, found)) == bool(told)
    context = next(row for row in plan.memory_items if row.name == "context")
    of_several = replace(plan, memory_items=(*plan.memory_items, replace(context, name="exchange", num_bytes=tensors)))
    found = compare(of_several, [{**row, "hbm_peak_bytes": int(1.07 * tensors)} for row in rows])
    assert found is not None
    assert warned(of_several, found).startswith("HBM: planned ")  # what NCCL takes is not among tensors


def test_a_spill_file_larger_than_planned_is_named_and_what_saves_read_is_not() -> None:
    plan = planned(PROFILE, spilled=True)
    rows = measured(plan, PROFILE)
    moved, on_disk = rows[0]["disk_bytes"], rows[0]["spill_bytes"]
    for more, told in (
        ({"disk_bytes": {**moved, "shards_read": 1.5 * moved["shards_read"]}}, ""),
        ({"spill_bytes": int(1.2 * on_disk)}, "on disk: planned "),
    ):
        found = compare(plan, [row | more for row in rows])
        assert found is not None
        assert warned(plan, found).startswith(told)
        assert bool(warned(plan, found)) == bool(told)


@pytest.mark.parametrize(
    ("column", "told"),
    [("weights_read", "weights read: planned "), ("activations_read", "activation traffic: planned ")],
)
def test_more_traffic_of_the_gpu_worker_than_planned_is_named(column: str, told: str) -> None:
    """It is the same in every step; of what shards move saves are a part."""
    plan = with_more_on_disk(planned(PROFILE, spilled=True), PROFILE)
    rows = measured(plan, PROFILE)
    moved = rows[0]["disk_bytes"]
    for factor, named in ((1.0, ""), (1.04, ""), (0.5, ""), (1.06, told)):
        more = {"disk_bytes": {**moved, column: factor * moved[column]}}
        found = compare(plan, [row | more for row in rows])
        assert found is not None
        assert warned(plan, found).startswith(named)
        assert bool(warned(plan, found)) == bool(named)


def test_all_that_moves_is_compared() -> None:
    plan = with_more_on_disk(planned(PROFILE, spilled=True), PROFILE)
    found = compared(plan, PROFILE)
    traffic, weights, activations, disk = (
        found.term(name) for name in ("disk traffic", "weights read", "activation traffic", "disk")
    )
    assert traffic and weights and activations and disk and plan.prediction
    assert weights.predicted == plan.disk.weight_read_bytes > 0
    assert activations.predicted == 2 * sum(plan.disk_activations) > 0
    of_shards = 2 * sum(r.num_bytes for r in plan.memory_items if r.tier is Tier.NVME and r.name != "activations")
    assert traffic.predicted == of_shards + weights.predicted + activations.predicted
    assert disk.predicted == pytest.approx(traffic.predicted / 2e9, rel=0.01)
    shown = [line[:18].strip() for line in comparison_table(found)]
    assert shown[-4:] == ["disk, a step", "of it weights", "of it activations", "on disk"]


def test_the_table() -> None:
    plan = planned(PROFILE, spilled=True)
    lines = list(comparison_table(compared(plan, PROFILE, slower=1.25)))
    assert lines[0] == f"steps 1 to 6, by the plan {plan.sha256[:12]}"
    shown = {line[:18].strip(): re.split(r"  +", line[18:].strip()) for line in lines[2:]}
    assert list(shown) == [
        "step", "compute", "wait h2d", "wait optimizer", "shards at work", "disk at work", "tensors in HBM",
        "disk, a step", "on disk",
    ]  # fmt: skip
    assert shown["step"][-1] == shown["disk at work"][-1] == "20% too little"
    assert shown["on disk"][-1] == "as measured"
