"""Aliased host memory: layers take the same memory in turn, so that a benchmark runs the steps of a model that this
machine cannot hold. Copies, updates and signals are those of the plan; only what they work on is several layers' at
once, so losses mean nothing. No training has it: `megatrain bench` alone makes such a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatrain_ray.engine.activations.activation_store import held_activation_bytes
from megatrain_ray.engine.layout.flat_layout import CUT_ELEMENTS
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.errors import ConfigError
from megatrain_ray.planning.prepare import Prepared
from megatrain_ray.units import format_bytes
from megatrain_ray.workers.arenas import arena_sizes

NOTE = "host memory aliased: losses mean nothing"
OPTION = "--alias-host-memory"


@dataclass(frozen=True)
class HostMemory:
    """Bytes of arenas and activations: what the plan has of them, and what the run takes."""

    planned_bytes: int
    held_bytes: int

    @staticmethod
    def of(prepared: Prepared) -> HostMemory:
        plain = replace(prepared, structure=replace(prepared.structure, aliased_size=None))
        return HostMemory(_host_bytes(plain), _host_bytes(prepared))


def with_aliases(prepared: Prepared, num_bytes: int) -> Prepared:
    """The same plan, with layers on the host taking `num_bytes` in turn, or a little less.

    Raises ConfigError where one layer takes more alone, where something would be on disk, which nothing aliases, or
    where the run could save what means nothing.
    """
    if prepared.config.save_every is not None:
        raise ConfigError(f"{OPTION}: save_every is {prepared.config.save_every}: nothing of such a run can be saved")
    plan, layout = prepared.plan, prepared.structure.layout(prepared.plan.num_fragments)
    if plan.uses_disk or plan.disk_activations:
        count = len(plan.spilled_layers.union(plan.stored_layers)) or len(plan.disk_activations)
        raise ConfigError(
            f"{OPTION}: the plan has state, gradients or activations of {count} layers on disk, which is not aliased: "
            "raise hardware.ram_limit, or leave spill.path out"
        )
    largest = max((layout.layers[i].size for i in plan.host_layers), default=0)
    size = num_bytes // _element_bytes(plan) // CUT_ELEMENTS * CUT_ELEMENTS
    if size < largest:
        alone = format_bytes(largest * _element_bytes(plan))
        raise ConfigError(
            f"{OPTION} {format_bytes(num_bytes)}: the largest layer alone takes {alone}; give more, and so much that "
            "layers do not meet in the caches"
        )
    return replace(prepared, structure=replace(prepared.structure, aliased_size=size))


def _element_bytes(plan: Plan) -> int:
    """Of everything that a parameter may have on the host."""
    working = plan.precision.working_dtype.itemsize
    return plan.precision.element_bytes + plan.slab_itemsize + (working if plan.host_activation_bytes else 0)


def _host_bytes(prepared: Prepared) -> int:
    plan, layout = prepared.plan, prepared.structure.layout(prepared.plan.num_fragments)
    return sum(arena_sizes(plan, layout).values()) + held_activation_bytes(plan, layout)
