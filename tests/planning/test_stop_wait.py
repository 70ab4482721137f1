"""How long a stop may take, and what a run in a job says when it has less."""

from __future__ import annotations

import pytest

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.planning.run_spec import prepare
from megatrain_ray.planning.stop_deadline import VARIABLE, stop_wait_s, warning_of
from tests.support.runs import config
from tests.support.tiny import build_tiny


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    return prepare(TrainConfig.model_validate(config(folder / "run", build_tiny(folder / "model"))).resolve()).plan


def test_two_steps_a_save_and_the_end_half_as_long_again(plan: Plan) -> None:
    rate = plan.save_bytes / 60  # a save takes a minute
    assert stop_wait_s(plan, 0, rate, step_s=5) == 120  # 1.5 × (2 × 5 + 60 + 10)
    assert stop_wait_s(plan, 100, rate, step_s=5) == 210  # one may be under way: 1.5 × 140
    assert stop_wait_s(plan, 0, rate, step_s=5.1) == 130
    assert stop_wait_s(plan, None, rate, step_s=5) == 0


@pytest.mark.parametrize(("environment", "given"), [({}, 3), ({VARIABLE: "119"}, 119), ({VARIABLE: "soon"}, 3)])
def test_too_little_time_is_said_with_what_to_set(environment: dict[str, str], given: int) -> None:
    warning = warning_of(120, environment)
    assert warning
    assert f"kills this run {given} s after" in warning
    assert f"{VARIABLE}=120 in the env_vars" in warning


def test_enough_time_and_no_save_are_no_news() -> None:
    assert warning_of(120, {VARIABLE: "120"}) is None
    assert warning_of(0, {}) is None
