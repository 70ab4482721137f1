"""NUMA nodes as the kernel shows them: CPUs, memory, distances, and the one that the GPU is attached to.

What this process may use is less than what is there: its affinity and the cpusets of its cgroups bound CPUs, the
latter memory, too. /proc/self/status has both as they are in force, whatever version the cgroups have; the files of
cgroups are read beside it because a container may show another process tree than its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from megatrain_ray.engine.device.numa_homes import NumaNode
from megatrain_ray.machine.proc_files import cgroup_folders, read_text
from megatrain_ray.units import parse_ranges

NODES = "sys/devices/system/node"
ANYWHERE = 255  # the distance to a node whose distance the kernel does not say: more than any it says


@dataclass(frozen=True)
class NodeFacts:
    """A node that is online. `cpus`: that this process may use. `total_bytes`, `free_bytes`: of its memory, 0 where it
    has none; `may_hold`: whether it has some and this process may take it. `distances`: to each node, 10 to itself."""

    number: int
    cpus: frozenset[int]
    total_bytes: int
    free_bytes: int
    may_hold: bool
    distances: Mapping[int, int] = field(default_factory=dict)

    @property
    def has_cpus(self) -> bool:
        return bool(self.cpus)


@dataclass(frozen=True)
class Topology:
    """`nodes`: those online, in the order of their numbers, which may have gaps; none where the kernel shows none.
    `allowed`: CPUs that this process may use, of nodes or not. `siblings`: of each of them the CPUs of its core."""

    nodes: tuple[NodeFacts, ...]
    allowed: frozenset[int]
    siblings: Mapping[int, frozenset[int]]

    @property
    def usable(self) -> tuple[NumaNode, ...]:
        """The nodes to work on: those with CPUs that this process may use. Memory alone makes no node of them."""
        return tuple(
            NumaNode(node.number, cores_of(node.cpus, self.siblings), self._nearest_memory(node))
            for node in self.nodes
            if node.has_cpus
        )

    def _nearest_memory(self, node: NodeFacts) -> int:
        """Itself where it may hold memory, or where no node may: then the kernel shows something else than is so."""
        holding = [other for other in self.nodes if other.may_hold]
        if node.may_hold or not holding:
            return node.number
        return min(holding, key=lambda other: (node.distances.get(other.number, ANYWHERE), other.number)).number


def read_topology(root: Path = Path("/"), allowed: Set[int] | None = None) -> Topology:
    """`root`: of /proc and /sys. `allowed`: CPUs of this process's affinity; None: the kernel is asked."""
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else frozenset(allowed)
    cpus = _within(allowed, _limits(root, "Cpus_allowed_list", "cpuset.cpus.effective", "cpuset.effective_cpus"))
    numbers = _numbers(root)
    mems = _within(
        frozenset(numbers), _limits(root, "Mems_allowed_list", "cpuset.mems.effective", "cpuset.effective_mems")
    )
    nodes = tuple(_node(root, number, numbers, cpus, mems) for number in numbers)
    return Topology(nodes, cpus, _siblings(root, cpus))


def gpu_node(address: str | None, root: Path = Path("/")) -> int | None:
    """The node that the device at a PCI address is attached to; None where the kernel does not know (-1)."""
    text = read_text(root / f"sys/bus/pci/devices/{address.lower()}/numa_node") if address else ""
    return int(text) if text.isdigit() else None


def cores_of(cpus: Iterable[int], siblings: Mapping[int, frozenset[int]]) -> tuple[tuple[int, ...], ...]:
    """The CPUs, those of one core together, in the order of the first of each."""
    left, cores = sorted(set(cpus)), []
    while left:
        core = tuple(cpu for cpu in left if cpu == left[0] or cpu in siblings.get(left[0], ()))
        cores.append(core)
        left = [cpu for cpu in left if cpu not in core]
    return tuple(cores)


def _numbers(root: Path) -> list[int]:
    """Of nodes that are online. A node's folder may outlive it, and older kernels have no file that says who is."""
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
        frozenset(_ranges(read_text(folder / "cpulist")) & cpus),
        total,
        memory.get("MemFree", 0),
        total > 0 and number in mems,
        dict(zip(numbers, distances, strict=False)),
    )


def _siblings(root: Path, cpus: Iterable[int]) -> dict[int, frozenset[int]]:
    folder = root / "sys/devices/system/cpu"
    return {cpu: frozenset(_ranges(read_text(folder / f"cpu{cpu}/topology/thread_siblings_list"))) for cpu in cpus}


def _limits(root: Path, status: str, v2: str, v1: str) -> Iterator[frozenset[int]]:
    """What bounds CPUs or memory, each by itself."""
    lines = read_text(root / "proc/self/status").splitlines()
    yield from (_ranges(line.partition(":")[2]) for line in lines if line.startswith(f"{status}:"))
    yield from (_ranges(read_text(folder / v2)) for folder in cgroup_folders(root, "", "sys/fs/cgroup"))
    yield from (_ranges(read_text(folder / v1)) for folder in cgroup_folders(root, "cpuset", "sys/fs/cgroup/cpuset"))


def _within(every: frozenset[int], limits: Iterable[frozenset[int]]) -> frozenset[int]:
    """Of all, what each limit leaves. One that is empty or leaves nothing is not of this process."""
    for limit in limits:
        every = (every & limit) or every
    return every


def _ranges(text: str) -> frozenset[int]:
    """None where the kernel, or who wrote the file, says something else."""
    try:
        return frozenset(parse_ranges(text))
    except ValueError:
        return frozenset()
