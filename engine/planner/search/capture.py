"""Decides when a step is captured: one CUDA graph instead of a launch for each of its operations. Pure."""

from __future__ import annotations

from dataclasses import replace

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.predict_step import predict
from megatrain_ray.engine.planner.request import Machine, Request
from megatrain_ray.errors import ConfigError

GAIN = 0.01  # share of a step's time; a guess: a capture that saves less is not worth its memory


def is_slowed_by_launches(plan: Plan, basis: CostBasis, activations: ActivationBytes) -> bool:
    """Return whether a step of the plan would be faster if the host launched nothing, wherever its layers live.

    activations: bytes for a micro-batch of the plan.
    """
    assert plan.prediction is not None
    without = predict(replace(plan, step=replace(plan.step, captured=True)), basis, activations)
    return without.step_s * (1 + GAIN) < plan.prediction.step_s


def captured(request: Request, machine: Machine, layout: ModelLayout) -> Request:
    """Return the request for captured steps, in which nothing may wait for the host.

    Raises ConfigError if a step cannot be captured.
    """
    problem = _problem(request, machine, layout)
    if problem:
        raise ConfigError(f"hardware.cuda_graphs: a step cannot be captured: {problem}; set it to auto")
    return replace(request, captured=True, hbm_layers=len(layout.layers))


def _problem(request: Request, machine: Machine, layout: ModelLayout) -> str | None:
    if machine.device != "cuda":
        return "there is no GPU"
    if request.hbm_layers not in (None, len(layout.layers)):
        count = len(layout.layers)
        return f"hardware.hbm_layers is {request.hbm_layers}, and all {count} layers must live in GPU memory"
    if layout.with_muon:
        return "what Muon trains lives on the host"
    if not request.clip:
        return "with train.clip: null layers are updated within it"
    return None
