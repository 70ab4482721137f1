"""Finds the processes that Ray has started for this one, watches those that a run cannot go on without, ends them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatrain_ray.errors import MegatrainError

END_TIMEOUT_S = 20.0
END_POLL_S = 0.02
DAEMONS = ("gcs_server", "raylet")
# Agents are started by the raylet, which ends when one of them does (agent_manager.cc). Keys are words of their command
# lines, before and after they have named themselves. A run does not need the log monitor, autoscaler and dashboard.
AGENTS = {
    "dashboard/agent.py": "dashboard agent",
    "ray::DashboardAgent": "dashboard agent",
    "runtime_env/agent/main.py": "runtime env agent",
    "ray::RuntimeEnvAgent": "runtime env agent",
}


@dataclass(frozen=True)
class Daemons:
    """Tracks, by name, those of Ray's processes in an embedded cluster without which a run cannot go on.

    Empty for a cluster that was joined: its processes are not known.
    """

    processes: Mapping[psutil.Process, str] = field(default_factory=dict)

    @staticmethod
    def among(started: Iterable[psutil.Process]) -> Daemons:
        """Return those found among the processes that `ray.init` started."""
        return Daemons({process: name for process in started if (name := _daemon_name(process))})

    @property
    def alive(self) -> bool:
        return not self._dead

    def check(self) -> None:
        """Raise MegatrainError naming those that died. Ray notices late, and then ends this process or lets it wait."""
        if dead := self._dead:
            raise MegatrainError(f"a process of the run died (Ray's {', '.join(dead)}); the same command resumes")

    @property
    def _dead(self) -> list[str]:
        return [name for process, name in self.processes.items() if not _lives(process)]


def _daemon_name(process: psutil.Process) -> str | None:
    """Return which of DAEMONS or AGENTS a process is, or None if it is none of them, or dead."""
    with suppress(psutil.NoSuchProcess):
        program, *words = process.cmdline() or [""]
        if Path(program).name in DAEMONS:  # before AGENTS: the raylet's command line contains theirs
            return Path(program).name
        return next((name for mark, name in AGENTS.items() if any(mark in word for word in (program, *words))), None)
    return None


def _lives(process: psutil.Process) -> bool:
    """Return whether a process has not ended yet.

    A zombie has ended, unless some of its threads have not: nobody can reap it until they have, and they hold its
    sockets and memory.
    """
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:  # it ended between the two calls
        return False


def started_since(before: set[int]) -> list[psutil.Process]:
    """Return the processes under this one that are not among the ids of `before`."""
    return [p for p in psutil.Process().children(recursive=True) if p.pid not in before]


def with_children(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still exist, and all that these have started."""
    found: dict[int, psutil.Process] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found |= {p.pid: p for p in (process, *process.children(recursive=True))}
    return list(found.values())


def end_processes(processes: list[psutil.Process], timeout_s: float) -> None:
    """Wait for processes that were told to stop, then kill by pid those that still live."""
    alive = _alive_after(processes, timeout_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _alive_after(alive, END_TIMEOUT_S)
    psutil.wait_procs(processes, timeout=0)  # reaps those that are children of this process


def _alive_after(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Return which processes live, once none does or after `timeout_s` seconds.

    One that nobody has reaped yet does not live. Without an init in a container nobody ever reaps those whose parent
    has ended.
    """
    deadline_s = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _lives(process)]) and time.monotonic() < deadline_s:
        time.sleep(END_POLL_S)
    return alive
