"""The engine takes as long as plans say on machines that nobody here has.

The machines are those of docs/worked_plans.md. There are fewer tokens a step, except in plans of one long sequence.
"""

from __future__ import annotations

import re
import shlex

import pytest

from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.machine import machine
from megatrain_ray.machine.numa_topology import Topology
from megatrain_ray.planning.run_spec import planning_problem
from megatrain_ray.virtual_clock import Record, Stage
from tests.support.runs import ROOT
from tests.support.simulated_device import StandIn

PAGE = (ROOT / "docs" / "worked_plans.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in re.findall(r"\$ megatrain plan ([^\n]+)", PAGE)]


def ended_s(records: tuple[Record, ...], plan: Plan) -> float:
    """When all is computed and all gradients have landed, but those that leave under the next step."""
    stages = [Stage.COMPUTE] if plan.deferred_offload_layers else [Stage.COMPUTE, Stage.H2D, Stage.D2H]
    return max(record.end_s for record in records if record.stage in stages)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=[] if name == "7.6b" else [pytest.mark.long])
        for settings, name in zip(COMMANDS, ("120b", "72b", "72b in 128 GB", "7.6b", "105b"), strict=False)
    ],
)
def test_a_step_takes_as_long_as_predicted(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step takes as long as predicted, to the last digits.

    With several micro-batches at a layer, inputs of layers that come and go share each direction with loads. Which of
    two comes first is a matter of threads in the engine: up to 0.9 % were seen. Where gradients leave under the next
    step the two differ by 1 in 10,000, which nobody has explained.
    """
    monkeypatch.setattr(machine, "allowed_cpus", lambda: 16)
    monkeypatch.setattr(machine, "read_topology", lambda root: Topology((), frozenset(), {}))
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: None)
    monkeypatch.chdir(ROOT)
    path, *overrides = settings
    question = planning_problem(load_config(path, [*overrides, "train.batch_size=64"]))
    plan = question.plan()
    assert plan.prediction is not None
    first, second = StandIn(question, plan).records(2)
    moving = any(layer.boundary is Tier.HOST for layer in plan.layers)
    tolerance = 0.02 if moving else 2e-4 if plan.deferred_offload_layers else 1e-6
    step_s = ended_s(second, plan) - ended_s(first, plan)
    assert step_s == pytest.approx(plan.prediction.step_s, rel=tolerance)
    for stage in (Stage.COMPUTE, Stage.H2D, *([] if plan.deferred_offload_layers else [Stage.D2H])):
        at_work_s = sum(record.end_s - record.start_s for record in second if record.stage is stage)
        assert at_work_s == pytest.approx(plan.prediction.busy_s[stage.value])
