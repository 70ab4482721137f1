"""Ray's session folders of drivers that were killed are removed; those of living ones stay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatrain_ray.cluster import LOCK_NAME, UNLOCKED_S, Daemons, _remove_stale_folders
from megatrain_ray.io.durable import take_lock

HOLDER = """
import sys
from pathlib import Path
from megatrain_ray.io.durable import take_lock
take_lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=f"megatrain-{os.getpid()}-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_a_killed_driver_leaves_nothing_whatever_its_pid(folder: Path) -> None:
    """The pid in the name lives: in another container that pid is somebody else's."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder / LOCK_NAME)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        _remove_stale_folders()
        assert folder.exists()
        holder.kill()
    _remove_stale_folders()
    assert not folder.exists()


def test_one_that_is_being_made_stays(folder: Path) -> None:
    _remove_stale_folders()
    assert folder.exists()


def test_what_processes_of_a_dead_driver_made_again_goes_after_a_while(folder: Path) -> None:
    (folder / "session_of_ray").mkdir()
    os.utime(folder, (0, time.time() - UNLOCKED_S - 1))
    _remove_stale_folders()
    assert not folder.exists()


def test_what_they_make_again_while_the_next_run_goes_on_goes_with_it(folder: Path) -> None:
    (folder / LOCK_NAME).touch()
    code = """
import pathlib, sys
from megatrain_ray.cluster import cluster
folder = pathlib.Path(sys.argv[1])
with cluster(num_cpus=1, num_gpus=0):
    assert not folder.exists()
    (folder / "session_of_ray").mkdir(parents=True)
"""
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    assert not folder.exists()


def test_one_of_this_process_stays(folder: Path) -> None:
    lock = take_lock(folder / LOCK_NAME)
    _remove_stale_folders()
    assert folder.exists()
    os.close(lock)


def test_a_daemon_that_goes_between_two_looks_is_dead() -> None:
    child = subprocess.Popen(["sleep", "60"])

    class Watched(psutil.Process):
        def is_running(self) -> bool:
            running = super().is_running()
            child.kill()
            child.wait()
            return running

    assert not Daemons((Watched(child.pid),)).alive


def test_a_cluster_that_ends_leaves_other_children_alone() -> None:
    """A tracker's service is started while the cluster is up, and outlives it."""
    code = """
import subprocess, psutil
from megatrain_ray.cluster import cluster
with cluster(num_cpus=1, num_gpus=0):
    child = subprocess.Popen(["sleep", "60"])
assert [p.pid for p in psutil.Process().children(recursive=True)] == [child.pid]
child.kill()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
