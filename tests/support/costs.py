"""Predicts what steps of Qwen2.5-7B cost on a typical GPU, as plans predict it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU, HardwareProfile
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.model.flops import work_of
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.prediction import Prediction
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.predict_step import predict
from megatrain_ray.engine.planner.request import Candidate, Machine, Request
from tests.support.candidate_plans import build_plan
from tests.support.shapes import qwen

MACHINE = Machine(device="cuda", num_cpus=16, num_nodes=1, ram_bytes=1 << 41, hbm_bytes=None, profile=TYPICAL_GPU)
REQUEST = Request(Precision.BF16, False, True, 16, 4, 1024)
KEEP, RECOMPUTE = ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE
OUTER, LAYERS = LoopOrder.MICRO_BATCHES_OUTER, LoopOrder.LAYERS_OUTER


@cache
def shape(seq_len: int = 1024) -> tuple[Any, ActivationBytes]:
    """Return structure and activations (of one sequence) of Qwen2.5-7B."""
    return qwen(28, seq_len, hidden=3584, heads=28, kv_heads=4, inner=18944)  # type: ignore[no-any-return]


def predicted(
    request: Request,
    candidate: Candidate,
    profile: HardwareProfile = TYPICAL_GPU,
    changes: dict[str, Any] | None = None,
    kept_bytes: int | None = None,
) -> Prediction:
    """Return the prediction for the candidate's plan.

    changes: fields to replace in all layers of the plan.
    kept_bytes: bytes of activations that each block keeps for a token, instead of its own.
    """
    structure, activations = shape(request.seq_len)
    activations = activations.times(request.micro_batch_size)
    if kept_bytes:
        tokens = request.micro_batch_size * request.seq_len
        activations = replace(activations, kept=(0, *(kept_bytes * tokens,) * 28, activations.kept[-1]))
    plan = build_plan(structure, activations, MACHINE, request, candidate)
    plan = replace(plan, layers=tuple(replace(layer, **changes or {}) for layer in plan.layers))
    return predict(plan, CostBasis(structure, structure.layout(), work_of(structure), profile, True, 0), activations)
