"""Makes the plan for a request: of the ways to run a step that fit the machine, the fastest by prediction. Pure."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.prediction import Prediction
from megatrain_ray.engine.plan.spill_layout import BLOCK_BYTES
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis, basis_of
from megatrain_ray.engine.planner.cost.predict_step import predict, predict_evaluation, predict_token
from megatrain_ray.engine.planner.memory.plan_builder import with_uploads
from megatrain_ray.engine.planner.request import Machine, Request
from megatrain_ray.engine.planner.search.infeasible import infeasibility_error
from megatrain_ray.engine.planner.search.search_results import SearchResults
from megatrain_ray.engine.planner.search.split_search import split_searches
from megatrain_ray.engine.spill.spill_transfers import TRANSFERS
from megatrain_ray.errors import CapacityError, ConfigError
from megatrain_ray.io.storage.packed_store import Packer
from megatrain_ray.units import format_bytes

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
        may_capture = request.captured is None and machine.device == "cuda"
        if may_capture and is_slowed_by_launches(plan, basis, activations_of(plan, activations, request)):
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


def predict_scores(
    plan: Plan, structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request
) -> float:
    """Predict the seconds of the log-probabilities of a batch. The arguments are those of predict_plan."""
    basis = basis_of(structure, machine, request)
    return predict_evaluation(plan, basis, activations_of(plan, activations, request))


def predict_sampled_token(
    plan: Plan, structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request
) -> float:
    """Predict the seconds of a token of all completions together. The arguments are those of predict_plan."""
    basis = basis_of(structure, machine, request)
    return predict_token(plan, basis, activations_of(plan, activations, request))


def activations_of(plan: Plan, activations: ActivationBytes, request: Request) -> ActivationBytes:
    """Return the activation bytes of one of the plan's micro-batches.

    activations: bytes for a micro-batch as requested.
    """
    plan_activations = activations.times(plan.step.micro_batch_size // request.micro_batch_size)
    return (plan_activations.in_chunks() or plan_activations) if plan.compute.mlp_chunk_tokens else plan_activations


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
    found = SearchResults()
    for way in _uploads(basis, request):
        for search in split_searches(basis, machine, way, activations, found):
            search.run()
    for best in found.best(uses_disk=True):
        best.search.vary_disk(best.candidate)
    if not request.clip and not basis.layout.with_muon:
        for best in found.best(uses_disk=False):
            best.search.vary_updates(best.candidate)
    if not found.plans:
        raise infeasibility_error(basis, machine, request, activations)
    return found.chosen()


def plan_with_compression(
    structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request
) -> Plan:
    """Return the plan of `make_plan`, without packing if nothing fits with it and it was chosen only for its rate.

    If the user asked for packing, the CapacityError says that packing is the reason, provided that a plan fits without
    it.
    """
    plan_on = partial(make_plan, structure, activations, request=request)
    try:
        return plan_on(machine)
    except CapacityError as error:
        if machine.spill is None or not machine.spill.way.packed:
            raise
        without = replace(machine, spill=machine.spill.unpacked)
        if machine.spill.may_be_unpacked:
            return plan_on(without)
        try:
            plan_on(without)
        except CapacityError:
            raise error from None
        shard_bytes = format_bytes(TRANSFERS * Packer.num_bytes(BLOCK_BYTES))
        raise CapacityError(
            f"spill.compression: zstd takes up to {shard_bytes} of host memory for each optimizer shard, and as much "
            f"again where weights are on disk; it fits with spill.compression=none, or auto. With zstd it {error}"
        ) from None
