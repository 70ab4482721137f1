"""make_plan: of the ways to run a step that fit a machine, the one that is predicted to be the fastest. Pure."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.prediction import Prediction
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis
from megatrain_ray.engine.planner.cost.predict_step import predict
from megatrain_ray.engine.planner.request import Machine, Request
from megatrain_ray.engine.planner.search.all_splits import basis_of, searches
from megatrain_ray.engine.planner.search.build import with_uploads
from megatrain_ray.engine.planner.search.capture import captured, is_slowed_by_launches
from megatrain_ray.engine.planner.search.infeasible import misfit
from megatrain_ray.engine.planner.search.split_search import Found
from megatrain_ray.errors import CapacityError, ConfigError

LINK_ABOVE_PCIE = 2.0  # times as fast copies between GPUs are where they have a link of their own; a guess


def make_plan(structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request) -> Plan:
    """The fastest that fits every limit. `activations`: of a micro-batch as requested.

    Raises CapacityError with the arithmetic of the plan that is nearest to fitting, and ConfigError where what is
    asked for cannot be.
    """
    basis = basis_of(structure, machine, request)
    if request.captured:
        plan = _fastest_captured(basis, machine, request, activations)
    else:
        plan = _fastest(basis, machine, request, activations)
        of_plan = activations_of(plan, activations, request)
        if request.captured is None and machine.device == "cuda" and is_slowed_by_launches(plan, basis, of_plan):
            with suppress(CapacityError, ConfigError):
                other = _fastest_captured(basis, machine, request, activations)
                plan = min(plan, other, key=lambda p: p.prediction.step_s if p.prediction else math.inf)
    return with_uploads(plan, structure, basis.layout)


def predict_plan(
    plan: Plan, structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request
) -> Prediction:
    """Of a plan that was made for this request before, by the machine's rates now. `activations` as of `make_plan`."""
    return predict(plan, basis_of(structure, machine, request), activations_of(plan, activations, request))


def activations_of(plan: Plan, activations: ActivationBytes, request: Request) -> ActivationBytes:
    """Of the plan's micro-batches. `activations`: of one as requested."""
    of_plan = activations.times(plan.micro_batch_size // request.micro_batch_size)
    return (of_plan.in_chunks() or of_plan) if plan.mlp_chunk_tokens else of_plan


def _fastest_captured(basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes) -> Plan:
    """Of those with a captured step."""
    request = captured(request, machine, basis.layout)
    try:
        return _fastest(basis, machine, request, activations)
    except CapacityError as error:
        raise CapacityError(f"hardware.cuda_graphs: with a captured step, all layers in GPU memory: {error}") from None


def _uploads(basis: CostBasis, request: Request) -> list[Request]:
    """The request with whole uploads, and with parts where nobody has chosen and these may be faster: over a link that
    is no part of PCIe, or both would take each other's room."""
    link, pcie = basis.profile.gpu_link_bytes_per_s, max(basis.profile.h2d_bytes_per_s, basis.profile.d2h_bytes_per_s)
    if request.num_gpus == 1 or request.gathers_slots is not None or link is None or link < LINK_ABOVE_PCIE * pcie:
        return [request]
    return [request, replace(request, gathers_slots=True)]


def _fastest(basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes) -> Plan:
    """Of all splits, and ways of uploading. `activations`, here and below: of a micro-batch as requested. Raises as
    `make_plan`."""
    found = Found()
    for way in _uploads(basis, request):
        for search in searches(basis, machine, way, activations, found):
            search.run()
    if not found.plans:
        raise misfit(basis, machine, request, activations)
    return found.chosen()
