"""`megatrain doctor` on this machine, and on trees of /proc and /sys that would hurt."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest

from megatrain_ray.commands.doctor import examine
from megatrain_ray.commands.doctor_numa import Finding, Severity
from megatrain_ray.engine.device.hardware_profile import HardwareProfile
from megatrain_ray.engine.measure.measure_profile import measure
from megatrain_ray.machine.machine import ram_bytes
from megatrain_ray.profiling import measure_process, profiles
from megatrain_ray.profiling.profiles import this_machine
from tests.profiling.test_profiles import LITTLE
from tests.support.machines import MEMORY_ONLY, Node, node_files
from tests.support.runs import cli_here

HEALTHY = {
    "proc/meminfo": "MemTotal: 1024 kB\nMemAvailable: 512 kB\nSwapTotal: 0 kB\n",
    "proc/sys/vm/overcommit_memory": "0",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force",
}


def plant(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def found(root: Path, topic: str) -> Finding:
    return next(finding for finding in examine(root, root) if finding.topic == topic)


def measured_in_process(function: str, bound_s: float, *arguments: str) -> str:
    """Take the place of a process that measures for ten seconds: measure less, in this one."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", ["-c", *arguments])
        patch.setattr(measure_process, "measure", partial(measure, effort=LITTLE))
        getattr(measure_process, function)()
    return printed.getvalue()


def test_this_machine_is_measured_and_examined_and_nothing_stays_behind(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(profiles, "_run", measured_in_process)
    disk = cache / "megatrain-ray" / "disks" / "0.json"  # of a folder that a run spilled to
    disk.parent.mkdir(parents=True)
    disk.write_text('{"version": 2, "folder": "/spill", "device": 1, "bytes_per_s": {}}')
    other = disk.with_name("notes.json")
    other.touch()
    for name in (".mine.partial", "saves/step_3"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "saves" / "step_3" / "manifest.json").touch()
    done = cli_here("doctor", str(tmp_path), "--measure")
    assert done.returncode == 0, done.stdout
    topics = [line[6:21].strip() for line in done.stdout.splitlines()]
    assert topics == [
        "versions", "GPU", "rates", "AdamW", "shared memory", "RAM", "overcommit", "swap", "cores", "NUMA balancing",
        "huge pages", "NUMA", "open files", "Ray", "/tmp", "token cache", "folders", "disk",
    ]  # fmt: skip
    assert "GB/s" in done.stdout.splitlines()[-1]
    assert sorted(file.name for file in tmp_path.iterdir()) == [".mine.partial", "saves"]
    folders = next(line for line in done.stdout.splitlines() if "by which it knows its own" in line)
    assert f"{tmp_path}/saves/step_3 and 1 more: named like" in folders or " more: named like" in folders
    [file] = (cache / "megatrain-ray" / "profiles").iterdir()
    assert HardwareProfile.from_json(file.read_text()).machine == this_machine("cpu")
    assert not disk.exists()
    assert other.exists(), "no record of a disk"
    assert f"({file})" in done.stdout.splitlines()[2]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = cli_here("doctor", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}/nowhere is no folder")


def test_a_disk_that_cannot_be_written_to_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    last = list(examine(tmp_path))[-1]
    assert (last.topic, last.severity) == ("disk", Severity.STOP)
    assert "Permission denied" in last.text


@pytest.mark.parametrize(
    ("topic", "file", "text", "state", "says"),
    [
        ("overcommit", "proc/sys/vm/overcommit_memory", "2", Severity.SLOW, "vm.overcommit_memory to 0 or 1"),
        ("swap", "proc/meminfo", "MemTotal: 9 kB\nSwapTotal: 2048 kB\n", Severity.NOTE, "2.00 MiB of swap"),
        ("cores", "sys/fs/cgroup/cpu.max", "50000 100000", Severity.SLOW, "the time of 0.5"),
        ("RAM", "sys/fs/cgroup/memory.max", "524288", Severity.NOTE, "a cgroup allows 512.00 KiB"),
        ("huge pages", "sys/kernel/mm/transparent_hugepage/enabled", "always [never]", Severity.NOTE, "never"),
        (
            "huge pages",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled",
            "advise [never]",
            Severity.NOTE,
            "echo advise",
        ),
    ],
)
def test_what_hurts_is_named(tmp_path: Path, topic: str, file: str, text: str, state: Severity, says: str) -> None:
    healthy, hurt = (
        plant(tmp_path / name, HEALTHY | files) for name, files in (("healthy", {}), ("hurt", {file: text}))
    )
    assert found(healthy, topic).severity is Severity.GOOD
    finding = found(hurt, topic)
    assert finding.severity is state
    assert says in str(finding)


def test_the_limit_of_an_inner_cgroup_counts(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        HEALTHY
        | {
            "proc/self/cgroup": "0::/system.slice/job.scope/step\n",
            "sys/fs/cgroup/system.slice/memory.max": "max",
            "sys/fs/cgroup/system.slice/job.scope/memory.max": "1000",
        },
    )
    assert ram_bytes(root) == 1000


def test_the_limit_of_an_inner_cgroup_of_the_first_version_counts(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        HEALTHY
        | {
            "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/slurm/job_7\n",
            "sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": "2000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
        },
    )
    assert ram_bytes(root) == 2000


def test_one_node_to_work_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    finding = found(plant(tmp_path, HEALTHY | MEMORY_ONLY), "NUMA")
    assert finding.severity is Severity.GOOD
    assert finding.text.startswith(
        "one node to work on (node 1: no CPUs to use, 64.00 GiB, 32.00 GiB free; node 2: no CPUs to use, 256.00 GiB, "
    )


def test_nodes_and_whether_the_kernel_takes_memory_from_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    here, elsewhere = (
        plant(tmp_path / name, HEALTHY | node_files([Node(0, "0", 4, [10, 20]), Node(number, "1", gib, [20, 10])]))
        for name, number, gib in (("here", 1, 0), ("elsewhere", 60, 4))
    )
    nodes = found(here, "NUMA")
    assert nodes.text == "node 0: CPUs 0, 4.00 GiB, 2.00 GiB free; node 1: CPUs 1, no memory"
    memory = found(here, "NUMA memory")
    assert (memory.severity, memory.text) == (Severity.GOOD, "pages are on the node that was asked for, of 0")
    refused = found(elsewhere, "NUMA memory")
    assert refused.severity is Severity.SLOW
    assert "the kernel does not take memory from a node that is asked for (Invalid argument)" in str(refused)
