"""What is read of a machine, from trees of files as kernels show them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatrain_ray.config.groups import HardwareConfig
from megatrain_ray.errors import ConfigError
from megatrain_ray.machine import machine
from megatrain_ray.machine.machine import free_threads, machine_of, ram_bytes, unused_gpu

GIB = 1 << 30
V1_UNLIMITED = "9223372036854771712"
V1, V2 = "sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory.max"


def test_threads_are_limited_by_user_and_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "proc/self/cgroup", "3:cpu,pids:/job\n0::/job\n")
    unlimited = machine.resource.RLIM_INFINITY
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (unlimited, unlimited))
    assert free_threads(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/job/pids.max", "max\n")
    assert free_threads(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/pids/job/pids.max", "500\n")
    write(tmp_path, "sys/fs/cgroup/pids/job/pids.current", "120\n")
    assert free_threads(tmp_path) == 380
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (1 << 20, unlimited))
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)  # of nobody here
    monkeypatch.setattr(machine, "_num_threads", lambda uid: (1 << 20) - 200 if uid == 4_000_000 else 0)
    assert free_threads(tmp_path) == 200


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def with_nodes(root: Path, cpu_lists: Sequence[str]) -> Path:
    """Write one folder for each node, and beside them another entry, as kernels have it."""
    for k, cpus in enumerate(cpu_lists):
        write(root, f"sys/devices/system/node/node{k}/cpulist", f"{cpus}\n")
    write(root, "sys/devices/system/node/online", f"0-{len(cpu_lists) - 1}\n")
    return root


def with_memory(root: Path, **limits: str) -> Path:
    write(root, "proc/meminfo", f"MemFree:  12 kB\nMemTotal:  {64 * GIB // 1024} kB\nMemAvailable:  12 kB\n")
    for kind, text in limits.items():
        write(root, {"v1": V1, "v2": V2}[kind], f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 64 * GIB),
        ({"v2": "max"}, 64 * GIB),
        ({"v2": str(8 * GIB)}, 8 * GIB),
        ({"v2": str(80 * GIB)}, 64 * GIB),
        ({"v1": V1_UNLIMITED}, 64 * GIB),
        ({"v1": str(8 * GIB)}, 8 * GIB),
        ({"v1": str(8 * GIB), "v2": "max"}, 8 * GIB),
        ({"v1": V1_UNLIMITED, "v2": str(4 * GIB)}, 4 * GIB),
    ],
)
def test_ram_is_the_smaller_of_total_and_limit(tmp_path: Path, limits: dict[str, str], expected: int) -> None:
    assert ram_bytes(with_memory(tmp_path, **limits)) == expected


@pytest.mark.parametrize("ram_limit", [2 * GIB, 500 * GIB])
def test_ram_limit_replaces_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ram_limit: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    root = with_memory(with_nodes(tmp_path, ["0", "1"]), v2=str(8 * GIB))
    assert machine_of(HardwareConfig(device="cpu"), root=root).ram_bytes == 8 * GIB
    found = machine_of(HardwareConfig(device="cpu", ram_limit=ram_limit), root=root)
    assert (found.device, found.num_nodes, found.ram_bytes, found.hbm_bytes) == ("cpu", 2, ram_limit, None)
    assert found.num_cpus >= 1


FREE = 80 * GIB - 512 * 2**20  # beside what the driver keeps


@pytest.mark.parametrize(("hbm_limit", "expected"), [(None, FREE), (24 * GIB, 24 * GIB), (500 * GIB, FREE)])
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_hbm_limit_only_lowers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, hbm_limit: int | None, expected: int
) -> None:
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: 80 * GIB)
    monkeypatch.setattr(machine, "gpus_here", lambda: 2)
    found = machine_of(HardwareConfig(device=device, hbm_limit=hbm_limit), root=with_memory(tmp_path))
    with pytest.raises(ConfigError, match=r"^hardware\.num_gpus: 3, and torch sees 2 on this machine; set it"):
        machine_of(HardwareConfig(device=device, hbm_limit=hbm_limit, num_gpus=3), root=with_memory(tmp_path))
    machine_of(
        HardwareConfig(device=device, hbm_limit=hbm_limit, num_gpus=3), imagined=True, root=with_memory(tmp_path)
    )
    assert (found.device, found.hbm_bytes) == ("cuda", expected)


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: None)
    root = with_memory(tmp_path)
    assert machine_of(HardwareConfig(device="auto"), root=root).device == "cpu"
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        machine_of(HardwareConfig(device="cuda", hbm_limit=24 * GIB), root=root)
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        machine_of(HardwareConfig(device="cuda"), imagined=True, root=root)
    imagined = machine_of(HardwareConfig(device="cuda", hbm_limit=24 * GIB), imagined=True, root=root)
    assert (imagined.device, imagined.hbm_bytes) == ("cuda", 24 * GIB)


def test_a_gpu_that_torch_does_not_see_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: None)
    by_default = HardwareConfig()
    assert unused_gpu(by_default, tmp_path) is None, "no driver"
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\n")
    warning = unused_gpu(by_default, tmp_path)
    assert warning and warning.startswith("warning: NVIDIA's driver 570.86.15 is loaded, and torch ")
    assert unused_gpu(HardwareConfig(device="cpu"), tmp_path) is None, "as the user wants it"
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: 1 << 34)
    assert unused_gpu(by_default, tmp_path) is None
