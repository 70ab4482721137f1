"""make_plan: of the ways to run a step that fit a machine, the one that is predicted to be the fastest. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from megatrain_ray.engine.activation_bytes import ActivationBytes
from megatrain_ray.engine.candidates import splits
from megatrain_ray.engine.cost_basis import CostBasis
from megatrain_ray.engine.cost_model import predict
from megatrain_ray.engine.layer_work import work_of
from megatrain_ray.engine.model import ModelStructure
from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.plan_capture import captured, is_slowed_by_launches
from megatrain_ray.engine.plan_chunks import may_chunk, mlp_chunk_tokens
from megatrain_ray.engine.plan_floors import Floors
from megatrain_ray.engine.plan_limits import beyond_device, missing_bytes
from megatrain_ray.engine.plan_report import explain_misfit
from megatrain_ray.engine.plan_request import Machine, Request
from megatrain_ray.engine.planner import with_uploads
from megatrain_ray.engine.prediction import Prediction
from megatrain_ray.engine.split_search import Found, SplitSearch
from megatrain_ray.errors import CapacityError, ConfigError

GRADIENT_BYTES = 4  # of an element that waits, at most


def make_plan(structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request) -> Plan:
    """The fastest that fits every limit. `activations`: of a micro-batch as requested.

    Raises CapacityError with the arithmetic of the plan that misses the fewest bytes, and ConfigError where what is
    asked for cannot be.
    """
    basis = _basis(structure, machine, request)
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


def lacks_device_memory(
    structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request
) -> bool:
    """Whether the plan that misses the fewest bytes is too large for the device. Arguments as of `make_plan`."""
    return beyond_device(_smallest(_basis(structure, machine, request), machine, request, activations)) > 0


def predict_plan(
    plan: Plan, structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request
) -> Prediction:
    """Of a plan that was made for this request before, by the machine's rates now. `activations` as of `make_plan`."""
    return predict(plan, _basis(structure, machine, request), activations_of(plan, activations, request))


def activations_of(plan: Plan, activations: ActivationBytes, request: Request) -> ActivationBytes:
    """Of the plan's micro-batches. `activations`: of one as requested."""
    of_plan = activations.times(plan.micro_batch_size // request.micro_batch_size)
    return (of_plan.in_chunks() or of_plan) if plan.mlp_chunk_tokens else of_plan


def _basis(structure: ModelStructure, machine: Machine, request: Request) -> CostBasis:
    layout = structure.layout(request.num_fragments)
    work = work_of(structure, request.active_experts, request.windows)
    spill = machine.spill
    disk = (spill.bytes_per_s, spill.plain_bytes_per_s, spill.direct_bytes_per_s) if spill else ()
    return CostBasis(structure, layout, work, machine.rates, machine.profile is not None, request.z_loss, *disk)


def _fastest_captured(basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes) -> Plan:
    """Of those with a captured step."""
    request = captured(request, machine, basis.layout)
    try:
        return _fastest(basis, machine, request, activations)
    except CapacityError as error:
        raise CapacityError(f"hardware.cuda_graphs: with a captured step, all layers in GPU memory: {error}") from None


def _fastest(basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes) -> Plan:
    """Of all splits. `activations`, here and below: of a micro-batch as requested. Raises as `make_plan`."""
    found = Found()
    for search in _searches(basis, machine, request, activations, found):
        search.run()
    if not found.plans:
        smallest = partial(_smallest, basis, machine, activations=activations)
        plan = smallest(request)
        # What a remedy saves are gradients that wait: where more is missing there is nothing to try.
        may_help = missing_bytes(plan) <= GRADIENT_BYTES * plan.num_trained
        raise CapacityError(explain_misfit(plan, _remedy(smallest, request) if may_help else None))
    return found.chosen()


def _searches(
    basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes, found: Found
) -> Iterator[SplitSearch]:
    """One for each split; two where micro-batches are large, the second with MLPs in chunks. `found`: gets what
    fits."""
    floors = Floors()
    for split in splits(request):
        of_split = activations.times(split.micro_batch_size // request.micro_batch_size)
        yield SplitSearch(basis, machine, split, of_split, found, floors)
        tokens = split.micro_batch_size * split.seq_len
        if not may_chunk(tokens, split.seq_len, has_disk=machine.spill is not None):
            continue
        chunk_tokens = mlp_chunk_tokens(basis.structure, tokens)
        if chunk_tokens and (in_chunks := of_split.in_chunks()):
            yield SplitSearch(basis, machine, replace(split, mlp_chunk_tokens=chunk_tokens), in_chunks, found, floors)


def _smallest(basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes) -> Plan:
    """Of all that can be tried the plan that misses the fewest bytes; the first where several do."""
    searches = _searches(basis, machine, request, activations, Found())
    return min((plan for search in searches for plan in search.smallest()), key=missing_bytes)


def _remedy(smallest: Callable[[Request], Plan], request: Request) -> str | None:
    """Settings with which something fits within the same limits, those that change least. None: there are none."""
    rounded, unclipped = replace(request, round_gradients=True), replace(request, clip=False)
    tried = {
        "train.grad_dtype=bf16": rounded,
        "train.clip=null": unclipped,
        "train.grad_dtype=bf16 and train.clip=null": replace(rounded, clip=False),
    }
    changed = ((settings, other) for settings, other in tried.items() if other != request)
    possible = (pair for pair in changed if pair[1].clip or not request.captured)
    return next((settings for settings, other in possible if missing_bytes(smallest(other)) == 0), None)
