"""What this machine has: cores, NUMA nodes, memory. Read from the kernel, never from settings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from megatrain_ray.engine.cuda_device import total_memory_bytes
from megatrain_ray.engine.plan_request import Machine
from megatrain_ray.errors import ConfigError

UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 for "no limit"


def probe_machine(
    device: str, hbm_limit: int | None, ram_limit: int | None, *, imagined: bool = False, root: Path = Path("/")
) -> Machine:
    """The machine as the plan sees it. `device`: auto, cpu or cuda. Limits only lower what is there, but
    `ram_limit` replaces it: on some virtual machines MemTotal starts small and grows as memory is touched.

    `imagined`: for a plan alone; a GPU that is not here has the memory of `hbm_limit`. Raises ConfigError when cuda is
    asked for and there is none.
    """
    hbm = total_memory_bytes() if device in ("auto", "cuda") else None
    if device == "cuda" and hbm is None:
        if not imagined or hbm_limit is None:
            raise ConfigError(
                "hardware.device is cuda, but torch sees no GPU here; set hardware.device: cpu or auto (a plan alone "
                "needs only hardware.hbm_limit)"
            )
        hbm = hbm_limit
    if hbm is not None or hbm_limit is not None:
        hbm_bytes = min(value for value in (hbm, hbm_limit) if value is not None)
    else:
        hbm_bytes = None
    return Machine(
        device="cpu" if hbm is None else "cuda",
        num_cpus=allowed_cpus(),
        num_nodes=num_nodes(root),
        ram_bytes=ram_limit or ram_bytes(root),
        hbm_bytes=hbm_bytes,
    )


def allowed_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_name(root: Path = Path("/")) -> str:
    """As its maker calls it; empty where the kernel does not say."""
    lines = read_text(root / "proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def driver_version(root: Path = Path("/")) -> str:
    """Of NVIDIA's kernel module; empty without one."""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", read_text(root / "proc/driver/nvidia/version"))
    return found[0] if found else ""


def ram_bytes(root: Path = Path("/")) -> int:
    """The smallest of MemTotal and the limits of the cgroups that this process is in."""
    return min([_mem_total(root / "proc/meminfo"), *cgroup_limits(root)])


def cgroup_limits(root: Path = Path("/")) -> list[int]:
    """Bytes of memory that each cgroup from this process's own up to the outermost allows; none where none does."""
    files = [folder / "memory.max" for folder in _cgroup_folders(root, "", "sys/fs/cgroup")]
    files += [folder / "memory.limit_in_bytes" for folder in _cgroup_folders(root, "memory", "sys/fs/cgroup/memory")]
    limits = (read_text(file) for file in files)
    return [int(text) for text in limits if text.isdigit() and int(text) < UNLIMITED]


def _cgroup_folders(root: Path, controller: str, mount: str) -> Iterator[Path]:
    """`controller`: "" for cgroup v2. In a container the path may be the host's, which is not there."""
    yield root / mount
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            inner = PurePosixPath(path.lstrip("/"))
            yield from (root / mount / folder for folder in (inner, *inner.parents) if folder.name)


def num_nodes(root: Path = Path("/")) -> int:
    """NUMA nodes that have CPUs; 1 where the kernel shows none."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return max(1, sum(bool(read_text(folder / "cpulist")) for folder in folders))


def _mem_total(path: Path) -> int:
    for line in read_text(path).splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_text(path: Path) -> str:
    """Of a file of /proc or /sys, stripped; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
