"""Builds the plan of one given candidate, and counts the uploads that complete every plan. Pure."""

from __future__ import annotations

from dataclasses import replace

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.model_layout import ModelLayout, largest_share
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_shards import read_bytes
from megatrain_ray.engine.plan.step_residency import residency_of
from megatrain_ray.engine.planner.memory.draft_plans import Drafts
from megatrain_ray.engine.planner.request import Candidate, Machine, Request


def build_plan(
    structure: ModelStructure,
    activations: ActivationBytes,
    machine: Machine,
    request: Request,
    candidate: Candidate,
) -> Plan:
    """Return the plan of one candidate, whether it fits or not."""
    layout = largest_share(structure.layout(request.num_fragments), request.num_hosts)
    draft = Drafts(structure, layout, activations, machine, request).plan(candidate)
    return with_uploads(draft, structure, layout)


def with_uploads(plan: Plan, structure: ModelStructure, layout: ModelLayout) -> Plan:
    """Return the plan with its uploads per step, and with the bytes of working copies read from disk for them."""
    of_step = plan.visits(layout.lowest_trained)
    loads = residency_of(of_step, structure, layout, plan).loads
    of_disk = read_bytes(plan, layout, (load.fragment for load in loads))
    return replace(
        plan,
        slots=replace(plan.slots, num_uploads=len(loads)),
        disk=replace(plan.disk, weight_read_bytes=of_disk),
    )
