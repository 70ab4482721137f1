"""What is said of a plan that is another one than before."""

from __future__ import annotations

import json
from dataclasses import replace

from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.planning.plan_diff import changes, is_same_placement
from tests.support.plan_versions import version_1
from tests.support.planned_steps import PROFILE, planned


def test_other_rates_and_limits_alone_are_the_same_placement() -> None:
    before = planned(PROFILE)
    now = planned(replace(PROFILE, copy_s=2 * PROFILE.copy_s))
    assert now.sha256 != before.sha256
    assert is_same_placement(before, replace(now, limits=replace(now.limits, ram_bytes=now.limits.ram_bytes - 1)))
    assert changes(before, before) == ""


def test_a_plan_of_several_hosts_from_before_it_said_so_uploads_parts() -> None:
    plan = replace(planned(PROFILE), hosts=replace(planned(PROFILE).hosts, num_gpus=2))
    assert changes(plan, replace(plan, slots=replace(plan.slots, gathered=True))) == "uploads whole → parts"
    tree = version_1(replace(plan, hosts=replace(plan.hosts, num_hosts=2)))
    del tree["gathers_slots"]
    assert Plan.from_json(json.dumps(tree)).slots.gathered
    assert not Plan.from_json(json.dumps(tree | {"num_hosts": 1})).slots.gathered


def test_what_is_placed_elsewhere_is_named() -> None:
    before, now = planned(PROFILE), planned(PROFILE, spilled=True)
    assert not is_same_placement(before, now)
    told = dict(part.rsplit(" → ", 1) for part in changes(before, now).split("; "))
    assert before.prediction is not None
    predicted = f"predicted {before.prediction.step_s:.3g} s a step"
    assert set(told) == {"host memory 1.00 TiB", "layers with state on disk 0", predicted}
    assert told["layers with state on disk 0"] == str(len(now.spilled_layers))


def test_another_order_of_updates_than_that_of_an_older_plan_is_named() -> None:
    now = planned(PROFILE, clip=False)
    tree = json.loads(now.to_json())
    late = tree["step"].pop("num_updated_late")
    assert late
    before = Plan.from_json(json.dumps(tree))
    assert before.layer_order == tuple(sorted(now.layer_order, reverse=True))
    assert not is_same_placement(before, now)
    assert changes(before, now) == f"layers updated last in forward order 0 → {late}"
