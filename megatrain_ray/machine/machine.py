"""Reads from the kernel, never from settings, what this machine has: cores, NUMA nodes and memory."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from megatrain_ray.config.groups import HardwareConfig, NodeConfig
from megatrain_ray.engine.device.cuda_info import num_gpus as gpus_here
from megatrain_ray.engine.device.cuda_info import pci_addresses, total_memory_bytes
from megatrain_ray.engine.device.numa_homes import Gpu
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.errors import ConfigError
from megatrain_ray.machine.named_nodes import named_gpus, named_nodes
from megatrain_ray.machine.numa_topology import gpu_node, read_topology
from megatrain_ray.machine.proc_files import cgroup_folders, read_text

UNLIMITED = 1 << 60  # cgroup v1 reports a number near 2^63 if there is no limit


def probe_machine(
    device: str, hbm_limit: int | None, ram_limit: int | None, *, nodes: Sequence[NodeConfig] = (),
    num_gpus: int = 1, num_hosts: int = 1, imagined: bool = False, root: Path = Path("/"),
) -> Machine:  # fmt: skip
    """Return the machine as the planner needs it.

    device: auto, cpu or cuda.
    hbm_limit: bytes; lowers the available GPU memory.
    ram_limit: bytes; replaces the available memory. On some virtual machines MemTotal starts small and grows as memory
    is touched.
    nodes: NUMA nodes by hand; they replace those that the kernel shows.
    num_gpus, num_hosts: GPUs of the run on all hosts, and hosts.
    imagined: for a plan without a run. A GPU that is not here is taken to have `hbm_limit` of memory.
    root: folder that holds /proc and /sys.

    Raises ConfigError if cuda is set and there is no GPU, if this machine has fewer GPUs than its share of `num_gpus`,
    or if `nodes` are not here.
    """
    hbm = total_memory_bytes() if device in ("auto", "cuda") else None
    if device == "cuda" and hbm is None:
        if not imagined or hbm_limit is None:
            raise ConfigError(
                "hardware.device is cuda, but torch sees no GPU here; set hardware.device: cpu or auto (a plan alone "
                "needs only hardware.hbm_limit)"
            )
        hbm = hbm_limit
    host_gpus = num_gpus // num_hosts
    if hbm is not None and not imagined and gpus_here() < host_gpus:
        of_hosts = f" on {num_hosts} hosts" if num_hosts > 1 else ""
        raise ConfigError(
            f"hardware.num_gpus: {num_gpus}{of_hosts}, and torch sees {gpus_here()} on this machine; set it to at most "
            f"{max(1, gpus_here()) * num_hosts}"
        )
    if hbm is not None or hbm_limit is not None:
        hbm_bytes = min(value for value in (hbm, hbm_limit) if value is not None)
    else:
        hbm_bytes = None
    topology = read_topology(root)
    addresses = pci_addresses() if hbm is not None else ()
    addresses += (None,) * max(0, host_gpus - len(addresses))  # no address: on the CPU device, or not on this machine
    usable, gpus = topology.usable, tuple(Gpu(address, gpu_node(address, root)) for address in addresses)
    if nodes:
        usable = named_nodes(nodes, topology, imagined=imagined)
        gpus = named_gpus(nodes, addresses, imagined=imagined)
    return Machine(
        device="cpu" if hbm is None else "cuda",
        num_cpus=allowed_cpus(),
        num_nodes=max(1, len(usable)),
        ram_bytes=ram_limit or ram_bytes(root),
        hbm_bytes=hbm_bytes,
        nodes=usable if len(usable) > 1 else (),
        gpus=gpus,
    )


def machine_of(hardware: HardwareConfig, *, imagined: bool = False) -> Machine:
    """Return the machine as `probe_machine` does, with the hardware settings of a configuration."""
    return probe_machine(
        hardware.device,
        hardware.hbm_limit,
        hardware.ram_limit,
        nodes=hardware.nodes,
        num_gpus=hardware.num_gpus,
        num_hosts=hardware.num_hosts,
        imagined=imagined,
    )


def allowed_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_name(root: Path = Path("/")) -> str:
    """Return the model name of the CPU; empty if the kernel does not report it."""
    lines = read_text(root / "proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def driver_version(root: Path = Path("/")) -> str:
    """Return the version of NVIDIA's kernel module; empty without one."""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", read_text(root / "proc/driver/nvidia/version"))
    return found[0] if found else ""


def ram_bytes(root: Path = Path("/")) -> int:
    """Return bytes of memory: the smallest of MemTotal and the limits of the cgroups that this process is in."""
    return min([_mem_total(root / "proc/meminfo"), *cgroup_limits(root)])


def cgroup_limits(root: Path = Path("/")) -> list[int]:
    """Return the memory limits in bytes of this process's cgroup and all its ancestors that have one."""
    files = [folder / "memory.max" for folder in cgroup_folders(root, "", "sys/fs/cgroup")]
    files += [folder / "memory.limit_in_bytes" for folder in cgroup_folders(root, "memory", "sys/fs/cgroup/memory")]
    limits = (read_text(file) for file in files)
    return [int(text) for text in limits if text.isdigit() and int(text) < UNLIMITED]


def _mem_total(path: Path) -> int:
    for line in read_text(path).splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
