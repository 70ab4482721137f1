"""Reads NUMA nodes and their GPUs from hardware.nodes, which replace those that the kernel shows.

That is useful if a virtual machine hides its nodes, or to divide one node into several or to join several into one.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain_ray.config.groups import NodeConfig
from megatrain_ray.engine.device.numa_homes import Gpu, NumaNode
from megatrain_ray.errors import ConfigError
from megatrain_ray.machine.numa_topology import Topology, cores_of
from megatrain_ray.units import format_ranges, parse_ranges


def named_nodes(settings: Sequence[NodeConfig], found: Topology, *, imagined: bool = False) -> tuple[NumaNode, ...]:
    """Return the nodes of the settings, numbered in their order.

    found: what the kernel shows.
    imagined: for a plan without a run, for a machine that is not here; nothing is checked.

    Raises ConfigError if CPUs are named that this process may not use, or nodes without memory that it may use.
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
    """Return the GPUs of a host, each with the node that the settings attach it to, if any.

    addresses: PCI addresses of the GPUs that are here, by torch's number; None if unknown.
    imagined: for a plan without a run; GPUs that are not here are added without an address.

    Raises ConfigError if a GPU is named that is not here.
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
