"""Makes the plan for a request: of the ways to run a step that fit the machine, the fastest by prediction. Pure."""

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

LINK_ABOVE_PCIE = 2.0  # GPUs have a link of their own if copies between them are so many times as fast; a guess


def make_plan(structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request) -> Plan:
    """Return the plan that is predicted to be the fastest of those that fit every limit.

    activations: bytes for a micro-batch as requested.

    Raises CapacityError if nothing fits, with the arithmetic of the plan that is nearest to fitting. Raises ConfigError
    if what is asked for is impossible.
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
    """Predict a step of a plan that was made for this request before, with the machine's rates of now.

    activations: as for `make_plan`.
    """
    return predict(plan, basis_of(structure, machine, request), activations_of(plan, activations, request))


def activations_of(plan: Plan, activations: ActivationBytes, request: Request) -> ActivationBytes:
    """Return the activation bytes of one of the plan's micro-batches.

    activations: bytes for a micro-batch as requested.
    """
    of_plan = activations.times(plan.step.micro_batch_size // request.micro_batch_size)
    return (of_plan.in_chunks() or of_plan) if plan.compute.mlp_chunk_tokens else of_plan


def _fastest_captured(basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes) -> Plan:
    """Return the fastest plan with a captured step.

    Raises CapacityError if none fits, and ConfigError if a step cannot be captured.
    """
    request = captured(request, machine, basis.layout)
    try:
        return _fastest(basis, machine, request, activations)
    except CapacityError as error:
        raise CapacityError(f"hardware.cuda_graphs: with a captured step, all layers in GPU memory: {error}") from None


def _uploads(basis: CostBasis, request: Request) -> list[Request]:
    """Return the ways to upload that are tried: whole layers, and parts if that may be faster.

    Parts are tried if the user has not chosen and the link between GPUs is no part of PCIe. Over PCIe, uploads and the
    exchange between GPUs would compete for it.
    """
    link, pcie = basis.profile.gpu_link_bytes_per_s, max(basis.profile.h2d_bytes_per_s, basis.profile.d2h_bytes_per_s)
    if request.num_gpus == 1 or request.gathers_slots is not None or link is None or link < LINK_ABOVE_PCIE * pcie:
        return [request]
    return [request, replace(request, gathers_slots=True)]


def _fastest(basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes) -> Plan:
    """Return the fastest plan over all splits and all ways to upload.

    activations: bytes for a micro-batch as requested.

    Raises as `make_plan` does.
    """
    found = Found()
    for way in _uploads(basis, request):
        for search in searches(basis, machine, way, activations, found):
            search.run()
    if not found.plans:
        raise misfit(basis, machine, request, activations)
    return found.chosen()
