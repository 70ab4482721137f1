"""A step that is captured: one graph of the device in place of a launch for each of its operations. Pure."""

from __future__ import annotations

from dataclasses import replace

from megatrain_ray.engine.activation_bytes import ActivationBytes
from megatrain_ray.engine.cost_model import CostBasis, predict
from megatrain_ray.engine.plan import Plan, Tier, UpdateOrder
from megatrain_ray.engine.plan_request import Request
from megatrain_ray.engine.plan_rows import hbm_rows
from megatrain_ray.engine.planner import fits
from megatrain_ray.errors import ConfigError
from megatrain_ray.units import format_bytes

GAIN = 0.01  # of a step's time; a guess: a capture that saves less is not worth its memory


def is_slowed_by_launches(plan: Plan, basis: CostBasis, activations: ActivationBytes) -> bool:
    """Whether a step of the plan would be faster if the host launched nothing, wherever its layers live. `activations`:
    of one of its micro-batches."""
    assert plan.prediction is not None
    without = predict(replace(plan, captured=True), basis, activations)
    return without.step_s * (1 + GAIN) < plan.prediction.step_s


def capture(plan: Plan, basis: CostBasis, activations: ActivationBytes, request: Request) -> Plan:
    """The same with a captured step, its memory and its prediction. `activations`: of one of its micro-batches. Raises
    ConfigError where the step cannot be captured."""
    plan = replace(plan, captured=True)
    rows = hbm_rows(plan, basis.structure, basis.layout, activations, z_loss=request.z_loss)
    plan = replace(plan, rows=(*rows, *(row for row in plan.rows if row.tier is not Tier.HBM)))
    problem = _problem(plan)
    if problem:
        raise ConfigError(f"hardware.cuda_graphs: this step cannot be captured: {problem}; set it to auto")
    return replace(plan, prediction=predict(plan, basis, activations))


def _problem(plan: Plan) -> str | None:
    """Why the plan's step cannot be captured; None: it can."""
    if plan.device != "cuda":
        return "there is no GPU"
    if plan.host_layers:
        return f"{len(plan.host_layers)} of {len(plan.layers)} layers do not live in GPU memory (hardware.hbm_layers)"
    if plan.update_order is not UpdateOrder.FORWARD:
        return "with train.clip: null layers are updated within it"
    if not fits(plan):
        assert plan.hbm_limit_bytes is not None  # or everything fits
        needs, limit = format_bytes(plan.total_bytes(Tier.HBM)), format_bytes(plan.hbm_limit_bytes)
        return f"it would need {needs} of GPU memory of {limit}"
    return None
