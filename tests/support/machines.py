"""Makes trees of /proc and /sys as kernels show them on machines that are not here, from a line for each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain_ray.units import parse_ranges

GIB = 1 << 30


def plant(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@dataclass(frozen=True)
class Node:
    """Describes a NUMA node. `distances`: to all nodes that are online, in their order."""

    number: int
    cpus: str
    gib: int
    distances: Sequence[int]


def node_files(nodes: Sequence[Node], threads_per_core: int = 1, online: str | None = None) -> dict[str, str]:
    """Return the files of /sys that describe these nodes.

    Hyper-threads are numbered as kernels do it: first those that come first in each core, then the others.

    online: numbers of the nodes that are online; None: all of `nodes`.
    """
    files = {"sys/devices/system/node/online": online or ",".join(str(node.number) for node in nodes)}
    for node in nodes:
        folder = f"sys/devices/system/node/node{node.number}"
        files[f"{folder}/cpulist"] = node.cpus
        files[f"{folder}/distance"] = " ".join(map(str, node.distances))
        files[f"{folder}/meminfo"] = (
            f"Node {node.number} MemTotal:       {node.gib * GIB // 1024} kB\n"
            f"Node {node.number} MemFree:        {node.gib * GIB // 2048} kB\n"
            f"Node {node.number} MemUsed:        {node.gib * GIB // 2048} kB"
        )
    cpus = [cpu for node in nodes for cpu in parse_ranges(node.cpus)]
    num_cores = len(cpus) // threads_per_core
    for cpu in cpus:
        siblings = range(cpu % num_cores, len(cpus), num_cores) if num_cores else [cpu]
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = ",".join(map(str, siblings))
    return files


def near(count: int, index: int, sockets: int = 1) -> list[int]:
    """Return the distances from node `index` of `count`: 10 to itself, 12 within its socket, 32 to another one."""
    per_socket = count // sockets
    return [10 if k == index else 12 if k // per_socket == index // per_socket else 32 for k in range(count)]


def address(number: int) -> str:
    """Return the PCI address of a GPU, as /sys names it."""
    return f"0000:{16 + 8 * number:02x}:00.0"


def gpu_files(nodes: Sequence[int]) -> dict[str, str]:
    """Return the files of /sys of GPUs that the kernel says are attached to these nodes."""
    return {f"sys/bus/pci/devices/{address(k)}/numa_node": str(node) for k, node in enumerate(nodes)}


ONE = node_files([Node(0, "0-15", 64, [10])])
TWO_SOCKETS = node_files([Node(0, "0-15,32-47", 256, [10, 21]), Node(1, "16-31,48-63", 256, [21, 10])], 2)
FOUR = node_files([Node(k, f"{16 * k}-{16 * k + 15}", 128, near(4, k, 2)) for k in range(4)])
EIGHT = node_files([Node(k, f"{8 * k}-{8 * k + 7}", 96, near(8, k, 2)) for k in range(8)])
# Two sockets, and the memory of an expander (CXL) behind each.
MEMORY_ONLY = node_files(
    [
        Node(0, "0-7", 64, [10, 21, 14, 24]),
        Node(1, "8-15", 64, [21, 10, 24, 14]),
        Node(2, "", 256, [14, 24, 10, 26]),
        Node(3, "", 256, [24, 14, 26, 10]),
    ]
)
# As POWER numbers them, and a node whose folder stayed when it was taken offline.
GAPS = node_files([Node(0, "0-7", 64, [10, 40]), Node(8, "16-23", 64, [40, 10]), Node(252, "", 0, [])], online="0,8")
# Node 1 has CPUs, and no memory in it.
MEMORYLESS = node_files(
    [Node(0, "0-3", 0, [10, 12, 32]), Node(1, "4-7", 32, [12, 10, 32]), Node(2, "8-11", 32, [32, 32, 10])]
)
CONTAINER = {"sys/fs/cgroup/cpuset.cpus.effective": "0-3"}  # /sys/devices/system/node is hidden
CPUSET_V2 = TWO_SOCKETS | {
    "proc/self/cgroup": "0::/jobs/one",
    "sys/fs/cgroup/cpuset.cpus.effective": "0-63",
    "sys/fs/cgroup/jobs/one/cpuset.cpus.effective": "16-31",
    "sys/fs/cgroup/jobs/one/cpuset.mems.effective": "1",
}
CPUSET_V1 = TWO_SOCKETS | {
    "proc/self/cgroup": "4:memory:/\n3:cpuset:/jobs/one",
    "sys/fs/cgroup/cpuset/jobs/one/cpuset.effective_cpus": "0-7,16-23",
    "sys/fs/cgroup/cpuset/jobs/one/cpuset.effective_mems": "0-1",
}
MEMS_RESTRICTED = TWO_SOCKETS | {"proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-63\nMems_allowed_list:\t0"}
