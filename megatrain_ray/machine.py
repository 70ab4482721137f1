"""What this machine has: cores, NUMA nodes, memory. Read from the kernel, never from settings."""

from __future__ import annotations

import os
from pathlib import Path

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
        num_cpus=len(os.sched_getaffinity(0)),
        num_nodes=num_nodes(root),
        ram_bytes=ram_limit or ram_bytes(root),
        hbm_bytes=hbm_bytes,
    )


def ram_bytes(root: Path = Path("/")) -> int:
    """The smaller of MemTotal and the cgroup's limit."""
    found = [_mem_total(root / "proc/meminfo")]
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(root / name)
        if text.isdigit() and int(text) < UNLIMITED:
            found.append(int(text))
    return min(found)


def num_nodes(root: Path = Path("/")) -> int:
    """NUMA nodes that have CPUs; 1 where the kernel shows none."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return max(1, sum(bool(_read(folder / "cpulist")) for folder in folders))


def _mem_total(path: Path) -> int:
    for line in _read(path).splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
