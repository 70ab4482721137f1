"""Runs make_plan where data on disk may be packed, and without packing if memory is too small for that. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.spill_layout import BLOCK_BYTES
from megatrain_ray.engine.planner.request import Machine, Request
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.engine.spill.spill_transfers import TRANSFERS
from megatrain_ray.errors import CapacityError
from megatrain_ray.io.storage.packed_store import Packer
from megatrain_ray.units import format_bytes


def plan_packed_or_not(
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
        of_shard = format_bytes(TRANSFERS * Packer.num_bytes(BLOCK_BYTES))
        raise CapacityError(
            f"spill.compression: zstd takes up to {of_shard} of host memory for each optimizer shard, and as much "
            f"again where weights are on disk; it fits with spill.compression=none, or auto. With zstd it {error}"
        ) from None
