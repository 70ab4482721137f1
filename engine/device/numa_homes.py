"""Chooses, in pure functions, the CPUs that each process works on and the NUMA nodes of its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TypeVar

from megatrain_ray.units import format_ranges, parse_ranges

T = TypeVar("T")


@dataclass(frozen=True)
class NumaNode:
    """Describes a NUMA node that has CPUs which this process may use."""

    number: int
    cores: tuple[tuple[int, ...], ...]  # these CPUs, grouped by core (hyper-threads of one core together)
    memory: int  # number of the nearest node that has memory this process may use, often the node itself


@dataclass(frozen=True)
class Gpu:
    """Describes a GPU of a host."""

    address: str | None  # PCI address as in /sys; None if torch does not report it, or the GPU is on another machine
    node: int | None  # number of the NUMA node that the GPU is attached to; None if unknown


@dataclass(frozen=True)
class Home:
    """Holds the CPUs and NUMA nodes that one process is bound to."""

    nodes: tuple[int, ...]  # numbers of the nodes whose CPUs it works on
    cpus: str  # these CPUs, in the kernel's notation (0-15,32-47)
    memory: tuple[int, ...]  # numbers of the nodes that its memory comes from, interleaved if there are several

    @cached_property
    def cpu_set(self) -> frozenset[int]:
        return frozenset(parse_ranges(self.cpus))

    def __str__(self) -> str:
        """Return, for example, "node 0 (16 CPUs)". The memory's node is named only if it differs."""
        nodes = f"node {self.nodes[0]}" if len(self.nodes) == 1 else f"nodes {format_ranges(self.nodes)}"
        count = len(self.cpu_set)
        memory = "" if self.memory == self.nodes else f", memory of node {format_ranges(self.memory)}"
        return f"{nodes} ({count} CPU{'s' * (count != 1)}{memory})"


@dataclass(frozen=True)
class GpuHome:
    """Holds the home of one GPU's worker."""

    address: str | None  # as in Gpu.address
    home: Home | None  # None if the worker may run anywhere


@lru_cache  # called for every candidate of a plan
def shard_homes(nodes: tuple[NumaNode, ...], num_shards: int) -> tuple[Home, ...]:
    """Return the home of each optimizer shard. Empty if there is one node: the kernel then needs no help.

    - As many shards as nodes: one node each.
    - More shards: several share a node. Each has cores of its own, as long as there are enough, and no core is split.
    - Fewer shards: a shard has several nodes, and memory of all of them.
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


@lru_cache
def gpu_homes(nodes: tuple[NumaNode, ...], gpus: tuple[Gpu, ...]) -> tuple[GpuHome, ...]:
    """Return the home of each GPU's worker: the whole node that the GPU is attached to, whoever else works there.

    A worker may run anywhere if that node is unknown or has no usable CPU. The result is empty if all may.
    """
    of_node = {node.number: _home([node]) for node in nodes} if len(nodes) > 1 else {}
    homes = tuple(GpuHome(gpu.address, None if gpu.node is None else of_node.get(gpu.node)) for gpu in gpus)
    return homes if any(of_gpu.home for of_gpu in homes) else ()


def home_at(homes: Iterable[GpuHome], address: str | None) -> Home | None:
    """Return the home of the worker of the GPU at `address`.

    For an address that is not in `homes`, return the home that all workers share, or None if they differ.
    """
    found = {of_gpu.home for of_gpu in homes if of_gpu.address == address} or {of_gpu.home for of_gpu in homes}
    return found.pop() if len(found) == 1 else None


def fewest_cpus(homes: Iterable[Home]) -> int:
    """Return the smallest number of CPUs of any home. With more threads a shard would only wait for the others."""
    return min(len(home.cpu_set) for home in homes)


def _home(nodes: Sequence[NumaNode], cores: Sequence[tuple[int, ...]] | None = None) -> Home:
    cores = [core for node in nodes for core in node.cores] if cores is None else cores
    cpus = format_ranges(cpu for core in cores for cpu in core)
    memory = tuple(sorted({node.memory for node in nodes}))
    return Home(tuple(node.number for node in nodes), cpus, memory)


def _portions(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Split `items` into `count` groups of adjacent items, as equal as possible, of at least one item each."""
    starts = [k * len(items) // count for k in range(count + 1)]
    return [items[start : max(stop, start + 1)] for start, stop in pairwise(starts)]


def slab_nodes(homes: Sequence[GpuHome], host_gpus: int, home: Home | None) -> tuple[int, ...]:
    """Return the nodes over which the slab's pages are interleaved.

    With one GPU worker on the host and a `home`, these are its memory nodes, else those of all GPU workers. Each GPU
    copies its part of a gradient to any free place in the slab, and shards of all nodes read it, so no page belongs to
    one node. On a single node, that node's memory and link would carry all the traffic. This is reasoned, not measured.
    """
    sharing = [home] if home and host_gpus == 1 else [of_gpu.home for of_gpu in homes]
    return tuple(sorted({node for one in sharing if one for node in one.memory}))
