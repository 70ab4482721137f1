"""Lets a benchmark run a model that this machine's host memory cannot hold: layers share host memory.

Layers use the same host memory in turn (aliased memory). Copies, updates and signals are those of the plan, but they
work on memory that several layers overwrite, so losses mean nothing. Only `megatrain bench` makes such a run, never a
training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatrain_ray.engine.activations.activation_store import held_activation_bytes
from megatrain_ray.engine.layout.flat_layout import CUT_ELEMENTS
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.errors import ConfigError
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.units import format_bytes
from megatrain_ray.workers.arenas import arena_sizes

NOTE = "host memory aliased: losses mean nothing"
OPTION = "--alias-host-memory"


@dataclass(frozen=True)
class HostMemory:
    """Holds the bytes of host memory for arenas and activations.

    planned_bytes: what the plan needs.
    held_bytes: what the run takes; less if memory is aliased.
    """

    planned_bytes: int
    held_bytes: int

    @staticmethod
    def of(run_spec: RunSpec) -> HostMemory:
        plain = replace(run_spec, structure=replace(run_spec.structure, aliased_size=None))
        return HostMemory(_host_bytes(plain), _host_bytes(run_spec))


def with_aliases(run_spec: RunSpec, num_bytes: int) -> RunSpec:
    """Return `run_spec` with the same plan, but host memory that all layers on the host share in turn.

    num_bytes: bytes of that memory; slightly less may be used.

    Raises ConfigError if one layer needs more than `num_bytes`, if the plan puts anything on disk (only memory can be
    aliased), or if `save_every` is set: a save of such a run would be meaningless.
    """
    if run_spec.config.save_every is not None:
        raise ConfigError(f"{OPTION}: save_every is {run_spec.config.save_every}: nothing of such a run can be saved")
    plan, layout = run_spec.plan, run_spec.structure.layout(run_spec.plan.num_fragments)
    if plan.uses_disk or plan.disk_activations:
        count = len(plan.spilled_layers.union(plan.gradients_on_disk)) or len(plan.disk_activations)
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
    return replace(run_spec, structure=replace(run_spec.structure, aliased_size=size))


def _element_bytes(plan: Plan) -> int:
    """Return the most bytes that one parameter needs on the host, with its gradient and activations."""
    working = plan.precision.working_dtype.itemsize
    return plan.precision.element_bytes + plan.gradients.slab_itemsize + (working if plan.host_activation_bytes else 0)


def _host_bytes(run_spec: RunSpec) -> int:
    plan, layout = run_spec.plan, run_spec.structure.layout(run_spec.plan.num_fragments)
    return sum(arena_sizes(plan, layout).values()) + held_activation_bytes(plan, layout)
