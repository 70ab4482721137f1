"""Implements `megatrain doctor`: finds what on this machine would stop a run or slow it down."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path

from megatrain_ray.commands.doctor_numa import Finding, Severity, examine_nodes
from megatrain_ray.crew.ray_cluster import session_folders
from megatrain_ray.data.tokenize_data import token_cache
from megatrain_ray.driver.run_saves import measure_disk
from megatrain_ray.engine.device.cuda_info import device_name, num_gpus, total_memory_bytes
from megatrain_ray.engine.optimizer.adamw import AdamWConstants
from megatrain_ray.engine.optimizer.torch_kernel import TorchBlocks
from megatrain_ray.engine.optimizer.update_kernel import open_kernel
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.files.owned_folder import MARK_NAME, has_mark
from megatrain_ray.io.saves.save_folder import list_saves, save_folder
from megatrain_ray.io.tokens.cache_pruning import UNUSED_DAYS, size_of, without_mark
from megatrain_ray.machine.machine import cgroup_limits
from megatrain_ray.machine.numa_topology import read_topology
from megatrain_ray.machine.proc_files import meminfo, read_text
from megatrain_ray.profiling.profiles import cached, describe_profile, profile_file, this_machine
from megatrain_ray.units import format_bytes

SLOW_DISK_BYTES_PER_S = 0.5e9
PROBE_BYTES = 256 << 20
NO_HUGE_PAGES = ("never", "deny")  # values of shmem_enabled with which arenas cannot get huge pages
FEW_FILES = 4096  # every process of a run opens all arenas, and Ray keeps a socket for each other process
ROOM_BYTES = 2 << 30  # for Ray's session folder: logs, and 128 MiB of object store if /dev/shm is small


def examine(folder: Path, root: Path = Path("/")) -> Iterator[Finding]:
    """Run all checks, and yield each finding as soon as it is made.

    folder: where runs would be saved, or a run's own directory.
    root: folder that holds /proc and /sys.
    """
    yield Finding("versions", Severity.GOOD, _versions())
    yield _gpu()
    yield _rates()
    yield _kernel()
    yield _attaching()
    for check in (_memory, _overcommit, _swap, _cores, _numa_balancing, _huge_pages):
        yield check(root)
    yield from examine_nodes(folder, root)
    yield _open_files()
    yield _ray()
    yield _session_folder()
    yield _tokens()
    yield _unmarked(folder)
    yield _disk(folder)


def _versions() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "ray", "transformers"))
    return f"Python {platform.python_version()}, {packages}"


def _gpu() -> Finding:
    total = total_memory_bytes()
    if total is None:
        return Finding("GPU", Severity.NOTE, "torch sees none: training runs on the CPU, for tests and small models")
    return Finding("GPU", Severity.GOOD, f"{device_name()}, {format_bytes(total)}")


def _rates() -> Finding:
    machine = this_machine("cpu" if total_memory_bytes() is None else "cuda")
    profile = cached(machine, num_gpus())
    if profile is None:
        text = "not measured here, plans are made with built-in ones"
        first = "the first training on this GPU does it, or " if machine.gpu else ""
        return Finding("rates", Severity.NOTE, text, f"{first}megatrain doctor --measure")
    return Finding("rates", Severity.GOOD, f"{describe_profile(profile)} ({profile_file(machine)})")


def _kernel() -> Finding:
    with closing(open_kernel(1, AdamWConstants(0.9, 0.95, 1e-8, 0.1))) as kernel:
        text = f"runs as {kernel.name}"
    if isinstance(kernel, TorchBlocks):
        return Finding("AdamW", Severity.SLOW, text, "install a C compiler (gcc or clang)")
    return Finding("AdamW", Severity.GOOD, f"{text}, bit-equal to torch here")


def _attaching() -> Finding:
    """Check that another process can open shared memory through /proc/<pid>/fd, as the processes of a run do."""
    with os.fdopen(os.memfd_create("megatrain-doctor"), "rb") as memory:
        path = f"/proc/{os.getpid()}/fd/{memory.fileno()}"
        done = subprocess.run([sys.executable, "-c", "import sys; open(sys.argv[1], 'r+b')", path], capture_output=True)
    if done.returncode:
        text = f"another process cannot open {path}"
        return Finding("shared memory", Severity.STOP, text, "run all of Ray in one container, with /proc, as one user")
    return Finding("shared memory", Severity.GOOD, "memfds can be attached by other processes")


def _memory(root: Path) -> Finding:
    total, available = (meminfo(root, name) for name in ("MemTotal", "MemAvailable"))
    limit = min(cgroup_limits(root), default=None)
    text = f"{format_bytes(available)} of {format_bytes(total)} available"
    if limit is not None and limit < total:
        return Finding("RAM", Severity.NOTE, f"{text}, but a cgroup allows {format_bytes(limit)}: plans obey that")
    return Finding("RAM", Severity.GOOD, text)


def _overcommit(root: Path) -> Finding:
    if read_text(root / "proc/sys/vm/overcommit_memory") == "2":
        advice = "set vm.overcommit_memory to 0 or 1"
        return Finding("overcommit", Severity.SLOW, "strict: large mappings may be refused though RAM is free", advice)
    return Finding("overcommit", Severity.GOOD, "not strict")


def _swap(root: Path) -> Finding:
    total = meminfo(root, "SwapTotal")
    if total and read_text(root / "proc/sys/vm/swappiness") not in ("0", "1"):
        text = f"{format_bytes(total)} of swap: state that is swapped out makes a step wait for the disk"
        return Finding("swap", Severity.NOTE, text, "swapoff -a, or vm.swappiness=1")
    return Finding("swap", Severity.GOOD, "none in the way")


def _cores(root: Path) -> Finding:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota, _, period = read_text(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and (allowed := int(quota) / int(period)) < usable:
        text = f"{usable} cores, but a cgroup allows the time of {allowed:.1f}"
        advice = "raise the container's CPU limit: threads are throttled in the midst"
        return Finding("cores", Severity.SLOW, text, advice)
    return Finding("cores", Severity.GOOD, f"{usable} of {there}, {_num_nodes(root)} NUMA node(s)")


def _num_nodes(root: Path) -> int:
    return max(1, len(read_topology(root).usable))


def _numa_balancing(root: Path) -> Finding:
    if _num_nodes(root) > 1 and read_text(root / "proc/sys/kernel/numa_balancing") not in ("", "0"):
        text = "the kernel moves pages between nodes while they are used"
        return Finding("NUMA balancing", Severity.NOTE, text, "sysctl kernel.numa_balancing=0")
    return Finding("NUMA balancing", Severity.GOOD, "off, or one node")


def _huge_pages(root: Path) -> Finding:
    folder = root / "sys/kernel/mm/transparent_hugepage"
    chosen = {name: _chosen(read_text(folder / name)) for name in ("enabled", "shmem_enabled")}
    text = f"private memory: {chosen['enabled']}, shared memory: {chosen['shmem_enabled']}"
    if chosen["shmem_enabled"] in NO_HUGE_PAGES:
        advice = "arenas ask for them: echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        return Finding("huge pages", Severity.NOTE, text, advice)
    return Finding("huge pages", Severity.NOTE if chosen["enabled"] == "never" else Severity.GOOD, text)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FEW_FILES:
        return Finding("open files", Severity.NOTE, f"at most {soft}", f"ulimit -n {min(hard, 65536)}")
    return Finding("open files", Severity.GOOD, f"up to {soft}")


def _ray() -> Finding:
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        return Finding("Ray", Severity.GOOD, "a run starts its own and takes it away again")
    advice = "start its nodes with RAY_memory_monitor_refresh_ms=0: Ray counts arenas as used and kills actors for it"
    return Finding("Ray", Severity.NOTE, f"runs use the cluster at {address}", advice)


def _session_folder() -> Finding:
    free_bytes = shutil.disk_usage("/tmp").free
    text = f"{format_bytes(free_bytes)} free"
    if free_bytes < ROOM_BYTES:
        return Finding("/tmp", Severity.SLOW, text, "Ray keeps logs and sockets there: free some")
    return Finding("/tmp", Severity.GOOD, text)


def _unmarked(folder: Path) -> Finding:
    """Find folders that look like those of this program but have no mark, and which it therefore never deletes.

    folder: searched for unfinished folders, and for saves if it is a run's directory.
    """
    left = [path for path in session_folders() if path.lstat().st_uid == os.geteuid() and not has_mark(path)]
    saves = (save_folder(folder / "saves", step) for step in list_saves(folder / "saves"))
    left += [path for path in (*saves, *sorted(folder.glob(".*.partial"))) if not has_mark(path)]
    with suppress(RuntimeError):  # without a home directory there is no cache
        left += without_mark(token_cache())
    if not left:
        return Finding("folders", Severity.GOOD, "none that only looks like one of this program's")
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    text = f"{left[0]}{more}: named like this program's, without the file {MARK_NAME} by which it knows its own"
    advice = "perhaps of an earlier release or another program; nothing deletes them: do so if you do not need them"
    return Finding("folders", Severity.NOTE, text, advice)


def _tokens() -> Finding:
    try:
        root = token_cache()
    except RuntimeError as error:
        return Finding("token cache", Severity.NOTE, f"none, tokens go to the run directory: {error}")
    number, num_bytes = size_of(root)
    text = f"{number} data sources, {format_bytes(num_bytes)} in {root}"
    return Finding("token cache", Severity.GOOD, f"{text}; what {UNUSED_DAYS} days have not used goes when more come")


def _disk(folder: Path) -> Finding:
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".megatrain-doctor-") as place:
            rate = measure_disk(Path(place), PROBE_BYTES, "none")
    except (OSError, MegatrainError) as error:
        return Finding("disk", Severity.STOP, f"cannot write to {folder}: {error}", "name another folder")
    text = f"{folder.absolute()} takes {rate / 1e9:.1f} GB/s, {format_bytes(shutil.disk_usage(folder).free)} free"
    if rate < SLOW_DISK_BYTES_PER_S:
        return Finding("disk", Severity.SLOW, text, "a save of 12 bytes per parameter waits for it; use a faster one")
    return Finding("disk", Severity.GOOD, text)


def _chosen(text: str) -> str:
    """Return the word in brackets of a kernel setting such as "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0] or "unknown"
