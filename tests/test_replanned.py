"""What is said of a plan that is another one than before."""

from __future__ import annotations

from dataclasses import replace

from megatrain_ray.replanned import changes, is_same_placement
from tests.planned_steps import PROFILE, planned


def test_other_rates_and_limits_alone_are_the_same_placement() -> None:
    before = planned(PROFILE)
    now = planned(replace(PROFILE, copy_s=2 * PROFILE.copy_s))
    assert now.sha256 != before.sha256
    assert is_same_placement(before, replace(now, ram_limit_bytes=now.ram_limit_bytes - 1))
    assert changes(before, before) == ""


def test_what_is_placed_elsewhere_is_named() -> None:
    before, now = planned(PROFILE), planned(PROFILE, spilled=True)
    assert not is_same_placement(before, now)
    told = dict(part.rsplit(" → ", 1) for part in changes(before, now).split("; "))
    assert before.prediction is not None
    predicted = f"predicted {before.prediction.step_s:.3g} s a step"
    assert set(told) == {"host memory 1.00 TiB", "layers with state on disk 0", predicted}
    assert told["layers with state on disk 0"] == str(len(now.spilled_layers))
