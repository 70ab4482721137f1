"""Homes: on which CPUs each process of a run works, and from which NUMA nodes its memory is taken. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from megatrain_ray.units import format_ranges, parse_ranges

T = TypeVar("T")


@dataclass(frozen=True)
class NumaNode:
    """One whose CPUs this process may use. `cores`: these CPUs, hyper-threads of one core together. `memory`: the node
    that its memory is taken from: itself, or the nearest that has some which this process may take."""

    number: int
    cores: tuple[tuple[int, ...], ...]
    memory: int


@dataclass(frozen=True)
class Home:
    """Of one process. `nodes`: whose CPUs it works on; `cpus`: which of them, as the kernel writes them (0-15,32-47).
    `memory`: the nodes that its memory is taken from, in turn where there are several."""

    nodes: tuple[int, ...]
    cpus: str
    memory: tuple[int, ...]

    @cached_property
    def cpu_set(self) -> frozenset[int]:
        return frozenset(parse_ranges(self.cpus))

    def __str__(self) -> str:
        """node 0 (16 CPUs); where memory is another node's that is said, too."""
        nodes = f"node {self.nodes[0]}" if len(self.nodes) == 1 else f"nodes {format_ranges(self.nodes)}"
        count = len(self.cpu_set)
        memory = "" if self.memory == self.nodes else f", memory of node {format_ranges(self.memory)}"
        return f"{nodes} ({count} CPU{'s' * (count != 1)}{memory})"


@lru_cache  # asked for every candidate of a plan
def shard_homes(nodes: tuple[NumaNode, ...], num_shards: int) -> tuple[Home, ...]:
    """Of each optimizer shard. As many as nodes: one each. More: shards share nodes, and each has cores of its own, as
    long as there are enough; none is split between two. Fewer: a shard has several nodes, and memory of all.

    None where there is one node: the kernel puts everything there by itself.
    """
    if len(nodes) < 2:
        return ()
    if num_shards < len(nodes):
        return tuple(_home(portion) for portion in _portions(nodes, num_shards))
    homes: list[Home] = []
    for index, node in enumerate(nodes):
        sharing = sum(k * len(nodes) // num_shards == index for k in range(num_shards))
        homes += [_home([node], cores) for cores in _portions(node.cores, sharing)]
    return tuple(homes)


def gpu_home(nodes: Sequence[NumaNode], gpu_node: int | None) -> Home | None:
    """Of the GPU worker: the node that the GPU is attached to. None where nobody knows it, where none of its CPUs may
    be used, or where there is one node."""
    return next((_home([node]) for node in nodes if node.number == gpu_node and len(nodes) > 1), None)


def fewest_cpus(homes: Iterable[Home]) -> int:
    """Of any of them: shards have equal parts of every layer, so more threads of one would wait for the others."""
    return min(len(home.cpu_set) for home in homes)


def _home(nodes: Sequence[NumaNode], cores: Sequence[tuple[int, ...]] | None = None) -> Home:
    """`cores`: of these nodes; None: all."""
    cores = [core for node in nodes for core in node.cores] if cores is None else cores
    cpus = format_ranges(cpu for core in cores for cpu in core)
    memory = tuple(sorted({node.memory for node in nodes}))
    return Home(tuple(node.number for node in nodes), cpus, memory)


def _portions(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """So many neighbours, as equal as can be; where there are fewer items than portions each has one."""
    if len(items) < count:
        return [[items[k * len(items) // count]] for k in range(count)]
    return [items[k * len(items) // count : (k + 1) * len(items) // count] for k in range(count)]
