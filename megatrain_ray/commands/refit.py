"""Implements `megatrain refit`: fits a hardware profile to what a run measured.

With the rates of the new profile, the prediction of the run's plan equals the measured time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain_ray.accounting.prediction_check import MIN_STEP_S, MIN_STEPS, Comparison
from megatrain_ray.engine.device.hardware_profile import HardwareProfile, RateCurve, RatePoint
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.prediction import Prediction
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.files.atomic_file import write_atomically
from megatrain_ray.planning.run_spec import predictor
from megatrain_ray.report.measured_starts import compare_start, measured_starts
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_lock import hold_lock
from megatrain_ray.virtual_clock import SUM_OVER_GPUS

COPY_WAITS = ("h2d", "d2h", "host_accumulation")
UNPREDICTED = ("data", "python")
MIN_COPY_SHARE = 0.05  # least share of a step spent waiting for copies from which their rate can be inferred
HALVINGS = 24
MAX_FACTOR = 64.0  # largest factor by which the rate of copies may change, up or down

Predict = Callable[[HardwareProfile], Prediction]
Fit = tuple[HardwareProfile, str]  # a profile with some rates changed, and a line on them, or an empty one


@dataclass(frozen=True)
class Refitted:
    """Holds a refitted profile and what changed.

    report: lines that say what changed, by how much, and what the profile predicts for the run.
    """

    profile: HardwareProfile
    report: tuple[str, ...]


def refit(run_dir: Path, out: Path) -> Refitted:
    """Fit a profile to the newest start of a finished run and write it to `out`.

    Raises ConfigError if `out` exists, or if the run has no comparison or plan to fit to.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: nothing is overwritten; name another file")
    files = RunFiles(run_dir.absolute())
    config = files.read_config()
    with hold_lock(files.path):
        found, plan = _compared(files)
    prediction = plan.prediction
    assert prediction is not None and prediction.profile is not None
    predict = predictor(config, plan)
    done = refitted(prediction, found, predict, gathered=plan.slots.gathered)
    write_atomically(out, done.profile.to_json())
    return done


def _compared(files: RunFiles) -> tuple[Comparison, Plan]:
    """Return the comparison of the newest start, and the plan that it had."""
    starts = measured_starts(files)
    if not starts:
        raise ConfigError(f"{files.path}: nothing was measured: a start must make {MIN_STEPS + 1} steps at least")
    start = starts[-1]
    plan = files.read_plan(start.plan_sha256)
    if plan is None:
        raise ConfigError(
            f"{files.path}: no plan has the SHA-256 {start.plan_sha256}, which that of steps "
            f"{start.rows[0]['step']} to {start.rows[-1]['step']} had before them; put plan.json back as it was written"
        )
    if plan.prediction is None or plan.prediction.profile is None:
        raise ConfigError(f"{files.path}: the plan is one of an earlier version and does not hold its rates")
    found = compare_start(files, start)
    if found is None:
        raise ConfigError(f"{files.path}: the rows of metrics.jsonl are of an earlier version, or were changed")
    if found.step.measured < MIN_STEP_S:
        raise ConfigError(
            f"{files.path}: its steps take {1000 * found.step.measured:.3g} ms, which is mostly Ray and Python and no "
            f"rate of the machine; train steps of {1000 * MIN_STEP_S:.0f} ms at least"
        )
    return found, plan


def refitted(prediction: Prediction, found: Comparison, predict: Predict, *, gathered: bool = False) -> Refitted:
    """Return the prediction's profile with those rates changed that the run has timed.

    predict: predicts the same plan with another profile.
    gathered: uploads were completed by all-gathers.
    """
    before = prediction.profile
    assert before is not None
    profile, compute = _fit_compute(before, found, prediction.compute_s.get(SUM_OVER_GPUS, 0.0))
    profile, updates = _fit_updates(profile, found, prediction.beside_copies)
    profile, disk = _fit_disk(profile, found)
    profile, copies = _fit_copies(profile, found, predict, gathered=gathered)
    step_s, now_s = _predictable_s(found), predict(profile).step_s
    result = (
        f"predicted     {now_s:.3g} s a step with these rates, {prediction.step_s:.3g} before; measured "
        f"{found.step.measured:.3g}, of which {found.step.measured - step_s:.2g} are no machine's: data, Ray, Python"
    )
    return Refitted(profile, tuple(filter(None, (compute, updates, disk, copies, result))))


def _predictable_s(found: Comparison) -> float:
    return found.step.measured - sum(term.measured for term in found.terms if term.name in UNPREDICTED)


def _untimed(profile: HardwareProfile, what: str, why: str) -> Fit:
    return profile, f"{what:<13} not timed: {why}"


def _fit_compute(profile: HardwareProfile, found: Comparison, sums_s: float) -> Fit:
    """Scale all compute rates by one factor: steps are timed as a whole, so the single rates cannot be told apart.

    sums_s: predicted seconds of sums over GPUs, which are measured too, but depend on the link. Its rate stays.
    """
    term = found.term("compute")
    if term is None or term.predicted <= sums_s:
        return profile, ""
    if term.measured <= sums_s:
        return _untimed(profile, "compute", "waits, and what sums over GPUs are predicted to take, leave it nothing")
    factor = (term.predicted - sums_s) / (term.measured - sums_s)
    faster = replace(
        profile,
        matmul={precision: _scaled(curve, factor) for precision, curve in profile.matmul.items()},
        grouped=profile.grouped and _scaled(profile.grouped, factor),
        attention=_scaled(profile.attention, factor),
        device_bytes_per_s=profile.device_bytes_per_s * factor,
        launch_s=profile.launch_s / factor,
    )
    return faster, f"compute       × {factor:.3g}: products, attention, device memory, launches"


def _scaled(curve: RateCurve, factor: float) -> RateCurve:
    return tuple(RatePoint(point.size, point.per_s * factor) for point in curve)


def _fit_updates(profile: HardwareProfile, found: Comparison, beside_copies: float) -> Fit:
    """Scale the rates of updates that predictions of this plan use: of updates alone, beside copies, or both."""
    term = found.term("updates")
    if term is None or not term.predicted:
        why = "no optimizer shard updated anything, or the rows are of an earlier version"
        return _untimed(profile, "AdamW", why)
    factor, before = term.predicted / term.measured, profile.updates_per_s(beside_copies)
    rates = ["adamw_per_s"] * (beside_copies < 1) + ["adamw_busy_per_s"] * (beside_copies > 0)
    changed: dict[str, Any] = {name: factor * getattr(profile, name) for name in rates}
    where = "beside copies" if beside_copies else "under a forward"
    return replace(
        profile, **changed
    ), f"AdamW         {before / 1e9:.3g} → {factor * before / 1e9:.3g} Gparam/s {where}"


def _fit_disk(profile: HardwareProfile, found: Comparison) -> Fit:
    """Scale all disk rates by one factor if there are several: the run does not time them separately."""
    measured, planned = found.disk_rates
    before, plain = profile.disk_bytes_per_s, profile.disk_plain_bytes_per_s
    if not measured:
        return profile, ""
    factor = measured / planned if planned else 1.0
    rate = before * factor if before and plain else measured
    was = f"{before / 1e9:.3g} → " if before else ""
    faster = replace(profile, disk_bytes_per_s=rate, disk_plain_bytes_per_s=plain and plain * factor)
    return faster, f"disk          {was}{rate / 1e9:.3g} GB/s, read and written"


def _fit_copies(profile: HardwareProfile, found: Comparison, predict: Predict, *, gathered: bool) -> Fit:
    """Scale the rates of copies so that the predicted time of a step equals the measured one.

    They are left as they are if waits for copies take less than `MIN_COPY_SHARE` of a step, or if no factor up to
    `MAX_FACTOR` predicts the measured time.
    """
    if gathered:
        return _untimed(profile, "copies", "uploads and all-gathers are waited for together")
    waited_s = sum(term.measured for term in found.terms if term.name in COPY_WAITS)
    if waited_s < MIN_COPY_SHARE * found.step.measured:
        return _untimed(profile, "copies", "computing hid them")

    def takes_too_long(log_factor: float) -> bool:
        return predict(_with_copies(profile, math.exp(log_factor))).step_s > _predictable_s(found)

    low, high = math.log(1 / MAX_FACTOR), math.log(MAX_FACTOR)  # too slow, too fast
    if takes_too_long(high) or not takes_too_long(low):
        return _untimed(profile, "copies", "with no rate of theirs is the step predicted to take this long")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if takes_too_long(middle) else (low, middle)
    factor = math.exp(high)
    return _with_copies(profile, factor), f"copies        × {factor:.3g}, by what was waited for them"


def _with_copies(profile: HardwareProfile, factor: float) -> HardwareProfile:
    return replace(
        profile,
        h2d_bytes_per_s=profile.h2d_bytes_per_s * factor,
        d2h_bytes_per_s=profile.d2h_bytes_per_s * factor,
        both_bytes_per_s=profile.both_bytes_per_s * factor,
        h2d_busy_bytes_per_s=profile.busy_h2d_bytes_per_s * factor,
        d2h_busy_bytes_per_s=profile.busy_d2h_bytes_per_s * factor,
    )
