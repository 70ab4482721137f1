"""Nodes that hardware.nodes names, in the place of those that the kernel shows: where a virtual machine hides its own,
where one node is to be taken for several, or several for one."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain_ray.config.schema import NodeConfig
from megatrain_ray.engine.device.numa_homes import Gpu, NumaNode
from megatrain_ray.errors import ConfigError
from megatrain_ray.machine.numa_topology import Topology, cores_of
from megatrain_ray.units import format_ranges, parse_ranges


def named_nodes(settings: Sequence[NodeConfig], found: Topology, *, imagined: bool = False) -> tuple[NumaNode, ...]:
    """Numbered in their order. `found`: what the kernel shows. `imagined`: for a plan alone, of a machine that is not
    here.

    Raises ConfigError for CPUs that this process may not use, and for nodes without memory that it may take.
    """
    if not imagined:
        _check(settings, found)
    return tuple(
        NumaNode(k, cores_of(parse_ranges(node.cpus), found.siblings), k if node.memory is None else node.memory)
        for k, node in enumerate(settings)
    )


def named_gpus(
    settings: Sequence[NodeConfig], addresses: Sequence[str | None], *, imagined: bool = False
) -> tuple[Gpu, ...]:
    """The GPUs of a host, each with the node that it is said to be attached to, if any. `addresses`: of those here.

    Raises ConfigError for GPUs that are not here.
    """
    of_all = next((k for k, node in enumerate(settings) if node.gpu), None)
    of_gpu = {gpu: k for k, node in enumerate(settings) for gpu in parse_ranges(node.gpus or "")}
    here = range(len(addresses))
    if missing := of_gpu.keys() - here:
        if not imagined:
            gpu = min(missing)
            raise ConfigError(
                f"hardware.nodes.{of_gpu[gpu]}.gpus: {format_ranges(missing)} not found: a host of this run has GPUs "
                f"{format_ranges(here)}, as torch numbers them"
            )
        addresses = (*addresses, *[None] * (max(missing) + 1 - len(addresses)))
    return tuple(Gpu(address, of_gpu.get(number, of_all)) for number, address in enumerate(addresses))


def _check(settings: Sequence[NodeConfig], found: Topology) -> None:
    holding = [node.number for node in found.nodes if node.may_hold]
    for k, node in enumerate(settings):
        if missing := set(parse_ranges(node.cpus)) - found.allowed:
            raise ConfigError(
                f"hardware.nodes.{k}.cpus: {node.cpus}: this process may not use {format_ranges(missing)}, only "
                f"{format_ranges(found.allowed)}"
            )
        memory = k if node.memory is None else node.memory
        if holding and memory not in holding and len(settings) > 1:
            raise ConfigError(
                f"hardware.nodes.{k}.memory: the kernel has no node {memory} with memory that this process may take: "
                f"expected one of {format_ranges(holding)}"
            )
