"""Reads from the kernel, never from settings, what this machine has: cores, NUMA nodes and memory."""

from __future__ import annotations

import os
import re
import resource
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from megatrain_ray.config.groups import HardwareConfig
from megatrain_ray.engine.device.cards import cards
from megatrain_ray.engine.device.cuda_info import num_gpus as gpus_here
from megatrain_ray.engine.device.cuda_info import pci_addresses, total_memory_bytes
from megatrain_ray.engine.device.numa_homes import Gpu
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.errors import ConfigError
from megatrain_ray.machine.numa_topology import gpu_node, named_gpus, named_nodes, read_topology
from megatrain_ray.machine.proc_files import cgroup_folders, meminfo, read_text

# GPU memory that no process gets. On an H200, a process that held 0.74 GiB by NVML left 1.09 GiB less than all.
DRIVER_BYTES = 512 << 20
UNLIMITED = 1 << 60  # cgroup v1 reports a number near 2^63 if there is no limit


def machine_of(hardware: HardwareConfig, *, imagined: bool = False, root: Path = Path("/")) -> Machine:
    """Return the machine as the planner needs it.

    imagined: for a plan without a run. A GPU that is not here is taken to have `hardware.hbm_limit` of memory, and one
        that hardware.profile names to have that or its own.
    root: folder that holds /proc and /sys.

    Raises ConfigError if cuda is set and there is no GPU, if this machine has fewer GPUs than its share of
    `hardware.num_gpus`, or if `hardware.nodes` are not here.
    """
    host_gpus = hardware.num_gpus // hardware.num_hosts
    hbm_bytes = _hbm_bytes(hardware, imagined=imagined)
    has_gpu = hbm_bytes is not None
    if has_gpu and not imagined and gpus_here() < host_gpus:
        of_hosts = f" on {hardware.num_hosts} hosts" if hardware.num_hosts > 1 else ""
        raise ConfigError(
            f"hardware.num_gpus: {hardware.num_gpus}{of_hosts}, and torch sees {gpus_here()} on this machine; set it "
            f"to at most {max(1, gpus_here()) * hardware.num_hosts}"
        )
    topology = read_topology(root)
    addresses = pci_addresses() if has_gpu else ()
    addresses += (None,) * max(0, host_gpus - len(addresses))  # no address: on the CPU device, or not on this machine
    usable, gpus = topology.usable, tuple(Gpu(address, gpu_node(address, root)) for address in addresses)
    if hardware.nodes:
        usable = named_nodes(hardware.nodes, topology, imagined=imagined)
        gpus = named_gpus(hardware.nodes, addresses, imagined=imagined)
    return Machine(
        device="cuda" if has_gpu else "cpu",
        num_cpus=allowed_cpus(),
        num_nodes=max(1, len(usable)),
        # In place of what is there: on some virtual machines MemTotal starts small and grows as memory is touched.
        ram_bytes=hardware.ram_limit or ram_bytes(root),
        hbm_bytes=hbm_bytes if has_gpu else hardware.hbm_limit,
        nodes=usable if len(usable) > 1 else (),
        gpus=gpus,
    )


def _hbm_bytes(hardware: HardwareConfig, *, imagined: bool) -> int | None:
    """Return bytes of GPU memory that the plan may use; None: layers run on the CPU."""
    if hardware.device == "cpu":
        return None
    total, limit = total_memory_bytes(), hardware.hbm_limit
    if imagined and (card := cards().get(hardware.profile)):
        return limit or card.memory_bytes
    if total is None:
        if hardware.device == "auto":
            return None
        if not imagined or limit is None:
            raise ConfigError(
                "hardware.device is cuda, but torch sees no GPU here; set hardware.device: cpu or auto (a plan alone "
                "needs only hardware.hbm_limit, or a card as hardware.profile)"
            )
        return limit
    return min(total - DRIVER_BYTES, limit or total)


def allowed_cpus() -> int:
    return len(os.sched_getaffinity(0))


def free_threads(root: Path = Path("/")) -> int | None:
    """Return how many more threads this process and its children may start; None if nothing limits them.

    The limits are the user's (ulimit -u), which does not bind root, and those of the cgroups that this process is in.
    """
    left = []
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and os.getuid():
        left.append(limit - _num_threads(os.getuid()))
    folders = (*cgroup_folders(root, "", "sys/fs/cgroup"), *cgroup_folders(root, "pids", "sys/fs/cgroup/pids"))
    for folder in folders:
        if (most := read_text(folder / "pids.max")).isdigit():
            left.append(int(most) - int(read_text(folder / "pids.current") or 0))
    return min(left, default=None)


def _num_threads(uid: int) -> int:
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            count += process.num_threads() if process.uids().real == uid else 0
    return count


def cpu_name(root: Path = Path("/")) -> str:
    """Return the model name of the CPU; empty if the kernel does not report it."""
    lines = read_text(root / "proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def driver_version(root: Path = Path("/")) -> str:
    """Return the version of NVIDIA's kernel module; empty without one."""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", read_text(root / "proc/driver/nvidia/version"))
    return found[0] if found else ""


def unused_gpu(hardware: HardwareConfig, root: Path = Path("/")) -> str | None:
    """Return a warning if training falls back to the CPU where the driver of a GPU is loaded; None otherwise."""
    driver = driver_version(root)
    if hardware.device != "auto" or not driver or total_memory_bytes() is not None:
        return None
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return (
        f"warning: NVIDIA's driver {driver} is loaded, and torch {torch.__version__} ({built}) sees no GPU: the CPU "
        "computes. Install a torch that this driver supports (pytorch.org/get-started), or set hardware.device: cpu"
    )


def ram_bytes(root: Path = Path("/")) -> int:
    """Return bytes of memory: the smallest of MemTotal and the limits of the cgroups that this process is in."""
    total = meminfo(root, "MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *cgroup_limits(root)])


def cgroup_limits(root: Path = Path("/")) -> list[int]:
    """Return the memory limits in bytes of this process's cgroup and all its ancestors that have one."""
    files = [folder / "memory.max" for folder in cgroup_folders(root, "", "sys/fs/cgroup")]
    files += [folder / "memory.limit_in_bytes" for folder in cgroup_folders(root, "memory", "sys/fs/cgroup/memory")]
    limits = (read_text(file) for file in files)
    return [int(text) for text in limits if text.isdigit() and int(text) < UNLIMITED]
