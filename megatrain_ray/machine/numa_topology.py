"""Reads the NUMA topology from the kernel: CPUs, memory and distances of nodes, and the node of a GPU.

A process may be allowed less than what exists. Its affinity limits the CPUs, and the cpusets of its cgroups limit CPUs
and memory. /proc/self/status reports both as they are in force, whatever the version of cgroups. The files of the
cgroups are read as well, because a container may show another process tree than its own.

Nodes of hardware.nodes replace what the kernel shows. That is useful if a virtual machine hides its nodes, or to divide
one node into several or to join several into one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain_ray.config.groups import NodeConfig
from megatrain_ray.engine.device.numa_homes import Gpu, NumaNode
from megatrain_ray.errors import ConfigError
from megatrain_ray.machine.proc_files import cgroup_folders, read_text
from megatrain_ray.units import format_ranges, parse_ranges

NODES = "sys/devices/system/node"
ANYWHERE = 255  # distance to a node if the kernel does not report it: more than any that it reports


@dataclass(frozen=True)
class NodeFacts:
    """Describes an online NUMA node.

    cpus: CPUs of the node that this process may use.
    total_bytes, free_bytes: memory of the node; 0 if it has none.
    may_hold: whether the node has memory that this process may use.
    distances: distance to each node; 10 to itself.
    """

    number: int
    cpus: frozenset[int]
    total_bytes: int
    free_bytes: int
    may_hold: bool
    distances: Mapping[int, int]


@dataclass(frozen=True)
class Topology:
    """Describes the NUMA nodes of a machine.

    nodes: online nodes by increasing number. Numbers may have gaps. Empty if the kernel shows none.
    allowed: CPUs that this process may use, of nodes or not.
    siblings: for each of these, all CPUs of the same core.
    """

    nodes: tuple[NodeFacts, ...]
    allowed: frozenset[int]
    siblings: Mapping[int, frozenset[int]]

    @property
    def usable(self) -> tuple[NumaNode, ...]:
        """Return the nodes to work on: those with CPUs that this process may use, not those that only have memory."""
        return tuple(
            NumaNode(node.number, cores_of(node.cpus, self.siblings), self._nearest_memory(node))
            for node in self.nodes
            if node.cpus
        )

    def _nearest_memory(self, node: NodeFacts) -> int:
        """Return the number of the nearest node that may hold memory, which is the node itself if it may."""
        holding = [other for other in self.nodes if other.may_hold]
        if node.may_hold or not holding:  # the kernel reports something wrong if no node may
            return node.number
        return min(holding, key=lambda other: (node.distances.get(other.number, ANYWHERE), other.number)).number


def read_topology(root: Path = Path("/"), allowed: Set[int] | None = None) -> Topology:
    """Read the NUMA topology.

    root: folder that holds /proc and /sys.
    allowed: CPUs of this process's affinity; None: ask the kernel.
    """
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else frozenset(allowed)
    cpus = _within(allowed, _limits(root, "Cpus_allowed_list", "cpuset.cpus.effective", "cpuset.effective_cpus"))
    numbers = _numbers(root)
    limits = _limits(root, "Mems_allowed_list", "cpuset.mems.effective", "cpuset.effective_mems")
    mems = _within(frozenset(numbers), limits)
    nodes = tuple(_node(root, number, numbers, cpus, mems) for number in numbers)
    folder = root / "sys/devices/system/cpu"
    siblings = {cpu: _ranges(read_text(folder / f"cpu{cpu}/topology/thread_siblings_list")) for cpu in cpus}
    return Topology(nodes, cpus, siblings)


def gpu_node(address: str | None, root: Path = Path("/")) -> int | None:
    """Return the node that the device at a PCI address is attached to; None if the kernel does not know it (-1)."""
    text = read_text(root / f"sys/bus/pci/devices/{address.lower()}/numa_node") if address else ""
    return int(text) if text.isdigit() else None


def cores_of(cpus: Iterable[int], siblings: Mapping[int, frozenset[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the CPUs grouped by core. Cores are ordered by their first CPU."""
    left, cores = sorted(set(cpus)), []
    while left:
        core = tuple(cpu for cpu in left if cpu == left[0] or cpu in siblings.get(left[0], ()))
        cores.append(core)
        left = [cpu for cpu in left if cpu not in core]
    return tuple(cores)


def _numbers(root: Path) -> list[int]:
    """Return the numbers of online nodes.

    The folder of a node may remain when it goes offline, and older kernels have no file that lists online nodes.
    """
    there = {int(path.name[4:]) for path in (root / NODES).glob("node[0-9]*") if path.name[4:].isdigit()}
    online = _ranges(read_text(root / NODES / "online"))
    return sorted(there & online if online else there)


def _node(root: Path, number: int, numbers: Sequence[int], cpus: Set[int], mems: Set[int]) -> NodeFacts:
    folder = root / NODES / f"node{number}"
    memory = {
        name: int(kib) * 1024
        for name, kib in re.findall(r"(MemTotal|MemFree):\s+(\d+) kB", read_text(folder / "meminfo"))
    }
    total = memory.get("MemTotal", 0)
    distances = map(int, read_text(folder / "distance").split())
    return NodeFacts(
        number,
        _ranges(read_text(folder / "cpulist")) & cpus,
        total,
        memory.get("MemFree", 0),
        total > 0 and number in mems,
        dict(zip(numbers, distances, strict=False)),
    )


def _limits(root: Path, status: str, v2: str, v1: str) -> Iterator[frozenset[int]]:
    """Yield each set of CPUs or nodes that this process is limited to, from its status and by each kind of cgroup."""
    lines = read_text(root / "proc/self/status").splitlines()
    yield from (_ranges(line.partition(":")[2]) for line in lines if line.startswith(f"{status}:"))
    yield from (_ranges(read_text(folder / v2)) for folder in cgroup_folders(root, "", "sys/fs/cgroup"))
    yield from (_ranges(read_text(folder / v1)) for folder in cgroup_folders(root, "cpuset", "sys/fs/cgroup/cpuset"))


def _within(every: frozenset[int], limits: Iterable[frozenset[int]]) -> frozenset[int]:
    """Return the intersection of `every` with the limits.

    A limit that is empty or would leave nothing is ignored: it cannot be this process's.
    """
    for limit in limits:
        every = (every & limit) or every
    return every


def _ranges(text: str) -> frozenset[int]:
    """Return the numbers in a list of the kernel; empty if the text has another format."""
    with suppress(ValueError):
        return frozenset(parse_ranges(text))
    return frozenset()


def named_nodes(settings: Sequence[NodeConfig], found: Topology, *, imagined: bool = False) -> tuple[NumaNode, ...]:
    """Return the nodes of the settings, numbered in their order.

    found: what the kernel shows.
    imagined: for a plan without a run, for a machine that is not here; nothing is checked.

    Raises ConfigError if CPUs are named that this process may not use, or nodes without memory that it may use.
    """
    memory = [k if node.memory is None else node.memory for k, node in enumerate(settings)]
    if not imagined:
        _check_nodes(settings, memory, found)
    cpus = [parse_ranges(node.cpus) for node in settings]
    return tuple(NumaNode(k, cores_of(cpus[k], found.siblings), memory[k]) for k in range(len(settings)))


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


def _check_nodes(settings: Sequence[NodeConfig], memory: Sequence[int], found: Topology) -> None:
    """Raise ConfigError as `named_nodes` does. `memory` is the number of each node's memory."""
    holding = [node.number for node in found.nodes if node.may_hold]
    for k, node in enumerate(settings):
        if missing := set(parse_ranges(node.cpus)) - found.allowed:
            raise ConfigError(
                f"hardware.nodes.{k}.cpus: {node.cpus}: this process may not use {format_ranges(missing)}, only "
                f"{format_ranges(found.allowed)}"
            )
        if holding and memory[k] not in holding and len(settings) > 1:
            raise ConfigError(
                f"hardware.nodes.{k}.memory: the kernel has no node {memory[k]} with memory that this process may "
                f"take: expected one of {format_ranges(holding)}"
            )
