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
class Gpu:
    """Of a host. `address`: on its PCI bus, as /sys names it; None where torch does not say, or it is not here. `node`:
    number of the one that it is attached to; None: nobody knows."""

    address: str | None
    node: int | None


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


@dataclass(frozen=True)
class GpuHome:
    """Of the worker of one GPU. `address`: as Gpu.address. `home`: None: it works anywhere."""

    address: str | None
    home: Home | None


@lru_cache  # asked for every candidate of a plan
def shard_homes(nodes: tuple[NumaNode, ...], num_shards: int) -> tuple[Home, ...]:
    """Of each optimizer shard. As many as nodes: one each. More: shards share nodes, and each has cores of its own, as
    long as there are enough; none is split between two. Fewer: a shard has several nodes, and memory of all.

    Empty where there is one node: the kernel puts everything there by itself.
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
    """Of the worker of each GPU: all of the node that the GPU is attached to, whoever else works there. Anywhere where
    nobody knows that node, or none of its CPUs may be used. Empty where that is so of every GPU, or there is one
    node."""
    of_node = {node.number: _home([node]) for node in nodes} if len(nodes) > 1 else {}
    homes = tuple(GpuHome(gpu.address, None if gpu.node is None else of_node.get(gpu.node)) for gpu in gpus)
    return homes if any(of_gpu.home for of_gpu in homes) else ()


def home_at(homes: Iterable[GpuHome], address: str | None) -> Home | None:
    """Of the worker of the GPU at an address. One that is not among them has the home that all of them have, if they
    have one."""
    found = {of_gpu.home for of_gpu in homes if of_gpu.address == address} or {of_gpu.home for of_gpu in homes}
    return found.pop() if len(found) == 1 else None


def _memory_of(homes: Iterable[Home | None]) -> tuple[int, ...]:
    """The nodes from which they take memory."""
    return tuple(sorted({node for home in homes if home for node in home.memory}))


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


def slab_nodes(homes: Sequence[GpuHome], host_gpus: int, home: Home | None) -> tuple[int, ...]:
    """Nodes that the slab's pages are taken from in turn: that of the host's only GPU worker, with its home, else those
    of all GPUs. Each GPU copies its part of a gradient to wherever there is room, and shards of all nodes read
    it, so no page belongs to one node; on one node its memory and its link would carry everything. Reasoned, not
    measured."""
    return _memory_of([home] if home and host_gpus == 1 else [of_gpu.home for of_gpu in homes])
