"""Makes the plan of one candidate, as the search does with the one that it chooses."""

from __future__ import annotations

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.model_layout import largest_share
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.memory.plan_builder import PlanBuilder, with_uploads
from megatrain_ray.engine.planner.request import Candidate, Machine, Request


def build_plan(
    structure: ModelStructure, activations: ActivationBytes, machine: Machine, request: Request, candidate: Candidate
) -> Plan:
    """Return the plan of one candidate, whether it fits or not."""
    layout = largest_share(structure.layout(request.num_fragments), request.num_hosts)
    plan = PlanBuilder(structure, layout, activations, machine, request).plan(candidate)
    return with_uploads(plan, structure, layout)
