"""Measures memory of processes: host memory as the kernel counts it, GPU memory by NVML."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

NAMES = {"shared": "Pss_Shmem", "private": "Pss_Anon", "files": "Pss_File"}


@dataclass(frozen=True)
class GpuMemoryUse:
    """Holds the bytes of GPU memory of a process.

    num_bytes: bytes; None if they are not known.
    reason: why there is no number, or what the number counts if it is not the process's own.
    """

    num_bytes: int | None
    reason: str | None = None


def pss(pid: int) -> dict[str, int]:
    """Return bytes of memory of a process by kind. Memory mapped by several processes is divided among them.

    Raises OSError if the process does not exist or belongs to another user.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    return {kind: 1024 * kib[name] for kind, name in NAMES.items()}


def pss_of_run(actors: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the memory of the actors, given as process ids by name, of this driver, and of Ray's own processes."""
    driver = os.getpid()
    of_ray: Counter[str] = Counter(dict.fromkeys(NAMES, 0))
    for process in psutil.Process(driver).children(recursive=True):
        if process.pid not in actors.values():
            with suppress(OSError, IndexError, KeyError):  # the process has just ended
                of_ray.update(pss(process.pid))
    return {**{name: pss(pid) for name, pid in actors.items()}, "driver": pss(driver), "Ray": dict(of_ray)}


def device_memory(pid: int) -> GpuMemoryUse:
    """Return the GPU memory of a process, on whatever GPU it uses.

    In a container NVML may list it under another process id. If only one process uses any GPU, that one is assumed.
    """
    try:
        used = _used_by_pid()
    except ImportError:
        return GpuMemoryUse(None, "nvidia-ml-py is not installed: pip install 'megatrain-ray[nvml]'")
    except Exception as error:  # NVMLError, which cannot be named: its module may be missing
        return GpuMemoryUse(None, f"NVML: {error}")
    if pid in used:
        return GpuMemoryUse(used[pid])
    if len(used) == 1:
        return GpuMemoryUse(next(iter(used.values())), "of the only process on the GPU: NVML knows it by another pid")
    return GpuMemoryUse(None, f"NVML lists {len(used)} processes, none with the pid {pid}")


def _used_by_pid() -> dict[int, int]:
    import pynvml  # an extra

    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        processes = [process for handle in handles for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    finally:
        pynvml.nvmlShutdown()
    return {process.pid: process.usedGpuMemory for process in processes if process.usedGpuMemory is not None}
