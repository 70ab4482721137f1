"""Nodes that hardware.nodes names, in the place of those that the kernel shows: where a virtual machine hides its own,
where one node is to be taken for several, or several for one."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain_ray.config import NodeConfig
from megatrain_ray.engine.homes import NumaNode
from megatrain_ray.errors import ConfigError
from megatrain_ray.topology import Topology, cores_of
from megatrain_ray.units import format_ranges, parse_ranges


def named_nodes(
    settings: Sequence[NodeConfig], found: Topology, *, imagined: bool = False
) -> tuple[tuple[NumaNode, ...], int | None]:
    """Numbered in their order, and which of them the GPU is attached to, if any is said to. `found`: what the kernel
    shows. `imagined`: for a plan alone, of a machine that is not here.

    Raises ConfigError for CPUs that this process may not use, and for nodes without memory that it may take.
    """
    if not imagined:
        _check(settings, found)
    nodes = tuple(
        NumaNode(k, cores_of(parse_ranges(node.cpus), found.siblings), k if node.memory is None else node.memory)
        for k, node in enumerate(settings)
    )
    return nodes, next((k for k, node in enumerate(settings) if node.gpu), None)


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
