"""Derives from a plan what a benchmark reports: where the state lies, and what a step moves."""

from __future__ import annotations

import torch

from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import SECOND_MOMENT_BYTES
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.plan_groups import UpdateOrder
from megatrain_ray.engine.plan.residency import residency_of
from megatrain_ray.virtual_clock import Stage


def state_share(plan: Plan) -> dict[str, float]:
    """Return each tier's share of the bytes of working copies, residuals and moments. The shares add up to 1."""
    num_bytes = dict.fromkeys(Tier, 0)
    for layer in plan.layers:
        num_bytes[layer.weights] += layer.num_parameters * plan.precision.working_dtype.itemsize
        num_bytes[layer.state] += layer.num_trained * plan.precision.state_bytes - layer.num_muon * SECOND_MOMENT_BYTES
    total = sum(num_bytes.values())
    return {tier.value: moved / total for tier, moved in num_bytes.items()}


def moved_bytes(plan: Plan, structure: ModelStructure) -> dict[str, int]:
    """Return the bytes that a step moves, by stage.

    h2d and d2h are what each GPU copies in that direction. disk is what all hosts read from and write to their disks.
    """
    layout = structure.layout(plan.num_fragments)
    of_muon = _muon_bytes(plan, layout)
    leaving, updated = (sum(layout.layers[i].trained.size for i in of) for of in (plan.layer_order, layout.updated))
    # Each GPU copies its part of these.
    divided = leaving * plan.gradients.offload_dtype.itemsize + sum(layout.direction_bytes)
    num_partial_sums = plan.step.num_micro_batches - 1 if plan.gradients.sums is Tier.HOST else 0
    sums = num_partial_sums * updated * plan.gradients.accumulate_dtype.itemsize
    spilled = plan.precision.state_bytes * sum(layout.layers[i].trained.size for i in plan.spilled_layers)
    weights = plan.precision.working_dtype.itemsize * sum(layout.layers[i].size for i in plan.weights_on_disk)
    stored = plan.gradients.offload_dtype.itemsize * sum(layout.layers[i].trained.size for i in plan.gradients_on_disk)
    on_disk = sum(plan.disk_activations) * plan.step.num_sweeps
    activations = plan.host_activation_bytes * plan.step.num_sweeps + on_disk
    return {
        Stage.H2D.value: _uploaded_bytes(plan, structure, layout) + sums + activations + of_muon // plan.hosts.num_gpus,
        Stage.D2H.value: sums + activations + divided // plan.hosts.num_gpus,
        Stage.DISK.value: 2 * (spilled + stored + weights + plan.hosts.num_gpus * on_disk)
        + plan.disk.weight_read_bytes,
    }


def _uploaded_bytes(plan: Plan, structure: ModelStructure, layout: ModelLayout) -> int:
    """Return the bytes of working copies that each GPU uploads in a step."""
    of_step = plan.visits(structure.without_backward)
    loads = residency_of(of_step, structure, layout, plan).loads
    elements = sum(layout.layers[load.fragment.layer].fragments[load.fragment.index].size for load in loads)
    num_bytes = elements * plan.precision.working_dtype.itemsize
    return num_bytes // plan.hosts.num_gpus if plan.slots.gathered else num_bytes


def _muon_bytes(plan: Plan, layout: ModelLayout) -> int:
    """Return the bytes that all GPUs together load from the host for Muon. They divide its matrices among themselves.

    These are the momenta and, with clipping, the gradients that waited for the scale.
    """
    each = torch.float32.itemsize
    if plan.step.update_order is not UpdateOrder.BACKWARD:
        each += plan.gradients.offload_dtype.itemsize
    return each * sum(layout.layers[layer].trained.size for layer in layout.with_muon)
