"""Ray's own processes: which of them a run cannot do without, and what is said when one dies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest

from megatrain_ray.crew.ray_cluster import _killing_late
from megatrain_ray.crew.ray_daemons import Daemons, end_processes
from megatrain_ray.errors import MegatrainError

NEEDED = {
    "gcs_server": ["/ray/core/src/ray/gcs/gcs_server", "--log_dir=/tmp"],
    "raylet": ["/ray/raylet/raylet", "--dashboard_agent_command=python /ray/dashboard/agent.py"],
    "dashboard agent": ["ray::DashboardAgent"],
    "runtime env agent": ["python", "-u", "/ray/_private/runtime_env/agent/main.py"],
}
OTHERS = {
    "log monitor": ["python", "-u", "/ray/_private/log_monitor.py"],
    "autoscaler": ["python", "-u", "/ray/autoscaler/_private/monitor.py"],
    "dashboard": ["python", "/ray/dashboard/dashboard.py"],
    "GPU worker": ["ray::GpuActor.step"],
}


@contextmanager
def waiting(command: list[str]) -> Iterator[psutil.Process]:
    """Yield a process with that command line and a word or two more, which does nothing until it is killed."""
    program = command[0]
    child = subprocess.Popen([program, "-c", "read _", *command], executable="/bin/sh", stdin=subprocess.PIPE)
    with child:
        try:
            yield psutil.Process(child.pid)
        finally:
            child.kill()


@contextmanager
def cluster() -> Iterator[dict[str, psutil.Process]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(waiting(command)) for name, command in (NEEDED | OTHERS).items()}


@pytest.mark.parametrize("name", NEEDED)
def test_a_run_ends_with_each_process_that_it_needs(name: str) -> None:
    with cluster() as processes:
        daemons = Daemons.among(processes.values())
        daemons.check()
        processes[name].kill()
        processes[name].wait()
        assert not daemons.alive
        with pytest.raises(MegatrainError, match=rf"^a process of the run died \(Ray's {name}\); the same command"):
            daemons.check()


def test_a_run_goes_on_without_the_others() -> None:
    with cluster() as processes:
        daemons = Daemons.among(processes.values())
        for name in OTHERS:
            processes[name].kill()
            processes[name].wait()
        daemons.check()
        assert daemons.alive


def test_a_call_of_ray_that_takes_too_long_loses_what_it_waits_for() -> None:
    """The call in the block ends when the process does."""
    with waiting(["raylet"]) as raylet, _killing_late(lambda: [raylet], 0.0):
        raylet.wait(100.0)
        assert not raylet.is_running()


def test_a_process_that_nobody_has_reaped_is_not_waited_for() -> None:
    """In a container without an init, orphans stay. (A shell as the parent could reap the child before its exec.)"""
    code = "import subprocess; child = subprocess.Popen('cat'); print(child.pid, flush=True); input()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        end_processes([child], 0.0)
        end_processes([child], 3600.0)
        assert child.status() == psutil.STATUS_ZOMBIE


def test_one_that_is_in_time_does_not() -> None:
    with waiting(["raylet"]) as raylet:
        with _killing_late(lambda: [raylet], 3600.0):
            pass
        assert raylet.is_running()
