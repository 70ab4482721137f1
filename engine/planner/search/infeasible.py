"""Explains why nothing fits, and what would. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from megatrain_ray.engine.device.hardware_profile import TYPICAL_DISK_BYTES_PER_S
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.cost.cost_basis import CostBasis, basis_of
from megatrain_ray.engine.planner.limits import beyond_device, fits, missing_bytes, shortfall
from megatrain_ray.engine.planner.report import explain_infeasible
from megatrain_ray.engine.planner.request import ANY_ROOM, Machine, Request, SpillSpace
from megatrain_ray.engine.planner.search.search_results import SearchResults
from megatrain_ray.engine.planner.search.split_search import split_searches
from megatrain_ray.errors import CapacityError
from megatrain_ray.units import format_bytes

SAVED_BYTES = 4  # per element: the most that rounded gradients or bf16 moments save


def lacks_device_memory(
    structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request
) -> bool:
    """Return whether the plan that is nearest to fitting is too large for the device.

    The arguments are those of `make_plan`.
    """
    basis = basis_of(structure, machine, request)
    return beyond_device(_smallest(basis, machine, request, activations, missing_bytes)) > 0


def infeasibility_error(
    basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes
) -> CapacityError:
    """Return the error for a request that no plan fits.

    Its message is the arithmetic of the plan that is nearest to fitting, and the changes with which some plan would
    fit. The arguments are those of `split_searches`.
    """
    plan = _smallest(basis, machine, request, activations, shortfall)
    error = CapacityError(
        *explain_infeasible(plan, list(_remedies(basis.structure, machine, request, activations, plan)))
    )
    error.shortfall = shortfall(plan)
    return error


def _smallest(
    basis: CostBasis, machine: Machine, request: Request, activations: ActivationBytes, missing: Callable[[Plan], int]
) -> Plan:
    """Return the plan that misses the least of all that can be tried; the first one if there are several.

    missing: computes how much a plan misses.
    """
    found = split_searches(basis, machine, request, activations, SearchResults(), least_memory=True)
    return min((plan for search in found for plan in search.smallest()), key=missing)


def _remedies(
    structure: ModelStructure, machine: Machine, request: Request, activations: ActivationBytes, plan: Plan
) -> Iterator[str]:
    """Yield what some plan fits with, within the same limits: a disk, or the settings that change least.

    plan: the one that misses the least.
    """

    def smallest(on: Machine, other: Request) -> Plan:
        return _smallest(basis_of(structure, on, other), on, other, activations, missing_bytes)

    if machine.spill is None and not request.captured:
        on_disk = smallest(replace(machine, spill=SpillSpace(ANY_ROOM, TYPICAL_DISK_BYTES_PER_S)), request)
        if fits(on_disk):
            yield f"a folder on NVMe with {format_bytes(on_disk.total_bytes(Tier.NVME))} of room as spill.path"
    # These settings shrink only gradients that wait and moments: if more is missing there is nothing to try.
    if missing_bytes(plan) <= SAVED_BYTES * plan.num_trained:
        tried = _smaller_requests(request, has_muon=bool(plan.num_muon))
        yield from islice((settings for settings, other in tried if fits(smallest(machine, other))), 1)


def _smaller_requests(request: Request, *, has_muon: bool) -> Iterator[tuple[str, Request]]:
    """Yield requests that take less memory, each with the settings that make it."""
    rounded, unclipped = replace(request, round_gradients=True), replace(request, clip=False)
    narrow = replace(request, precision=Precision.of(request.precision.compute, "bf16"))
    tried = {
        "train.grad_dtype=bf16": rounded,
        "train.clip=null": unclipped,
        "train.grad_dtype=bf16 and train.clip=null": replace(rounded, clip=False),
    }
    if not has_muon:
        tried["train.moments=bf16"] = narrow
    yield from ((settings, other) for settings, other in tried.items() if _is_possible(other, request))


def _is_possible(other: Request, request: Request) -> bool:
    return other != request and (other.clip or not request.captured)
