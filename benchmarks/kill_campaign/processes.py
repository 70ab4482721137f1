"""Shows the processes of a run from outside: which is which, what each is doing, and whether any is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import psutil

MARK = "MEGATRAIN_KILLED_RUN"  # in the environment of every process of a run that is to be killed; its value names it
STOP_S = 5.0  # limit for a stopped process to stand still: a thread may be in the middle of a write to disk


class Role(Enum):
    """Names a kind of process as messages of the run do."""

    DRIVER = "driver"
    GPU = "GPU worker"
    SHARD = "optimizer shard"
    DATA = "data"
    OWNER = "arena owner"
    GCS = "gcs_server"
    RAYLET = "raylet"
    DASHBOARD_AGENT = "dashboard agent"
    RUNTIME_ENV_AGENT = "runtime env agent"
    LOG_MONITOR = "log monitor"


TITLES = {
    Role.GPU: "ray::GpuActor",
    Role.SHARD: "ray::ShardWorker",
    Role.DATA: "ray::DataWorker",
    Role.OWNER: "ray::ArenaOwner",
}
RAYLET_ENDS_WITH = {
    Role.DASHBOARD_AGENT: "ray::DashboardAgent",
    Role.RUNTIME_ENV_AGENT: "ray::RuntimeEnvAgent",
}
SCRIPTS = {  # scripts of those of Ray's processes without which a run goes on
    Role.LOG_MONITOR: "/ray/_private/log_monitor.py",
}


class Actor(NamedTuple):
    """Names one process of a run. `number`: that of a shard; None for a shard that has not mapped its state yet."""

    role: Role
    number: int | None = None

    def __str__(self) -> str:
        return self.role.value if self.number is None else f"{self.role.value} {self.number}"


class Frame(NamedTuple):
    """Holds one frame of the stack of a Python thread."""

    thread: str
    file: str
    function: str


class Processes:
    """Tracks all processes that descend from a driver, including those that outlive it."""

    def __init__(self, driver: int, mark: str) -> None:
        self._driver = driver
        self._mark = f"{MARK}={mark}".encode()
        self._known: dict[int, psutil.Process] = {}

    def refresh(self) -> None:
        """Remember the processes that are there now."""
        for pid in (self._driver, *self._known):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                found = [process, *process.children(recursive=True)]
                self._known |= {p.pid: p for p in found if p.pid not in self._known}

    def find(self, actor: Actor) -> int | None:
        """Return the process that is this actor now, or None. It is cheap if the process was known before."""
        if actor.role is Role.DRIVER:
            return self._driver
        for _ in range(2):
            for pid in reversed(self._known):
                if _is(pid, actor):
                    return pid
            self.refresh()
        return None

    def left(self) -> list[str]:
        """Return the processes that still run, each as a line of pid and title."""
        self.refresh()
        known = {pid for pid, process in self._known.items() if process.is_running() and state(pid) not in "ZX"}
        marked = {int(path.name) for path in Path("/proc").glob("[0-9]*") if self._mark in _read(path / "environ")}
        return [f"{pid} {title(pid)[:80]}" for pid in sorted(known | marked - {os.getpid()}) if state(pid) not in "ZX"]

    def await_end(self, timeout_s: float) -> list[str]:
        """Return the processes that still run after at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while (left := self.left()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return left

    def kill_all(self) -> None:
        """Kill every process that still runs, by pid and never by name, to end a run that would not end."""
        for line in self.left():
            with suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)


def title(pid: int) -> str:
    """Return what a process calls itself: Ray's actors add the method that they run."""
    return _read(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ").decode(errors="replace").strip()


def arenas(pid: int, *, mapped: bool) -> dict[str, int]:
    """Return the shared memory of a run in a process, as file descriptors by what it holds.

    mapped: only memory that the process has mapped; the descriptors are -1.
    """
    found = {}
    if mapped:
        for line in _read(Path(f"/proc/{pid}/maps")).decode(errors="replace").splitlines():
            if "/memfd:" in line:
                found[_content(line.split("/memfd:")[1])] = -1
        return found
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(path.readlink())
                if target.startswith("/memfd:"):
                    found[_content(target.removeprefix("/memfd:"))] = int(path.name)
    return found


def shard_number(pid: int) -> int | None:
    """Return which shard a process is, or None before it has mapped its state."""
    states = [name for name in arenas(pid, mapped=True) if name.startswith("state-")]
    return int(states[0].removeprefix("state-")) if states else None


def stop(pid: int) -> bool:
    """Send SIGSTOP; return True when every thread stands still, False if the process is gone or does not get there."""
    deadline_s = time.monotonic() + STOP_S
    try:
        os.kill(pid, signal.SIGSTOP)
        while any(state(pid, int(task.name)) not in "Tt" for task in Path(f"/proc/{pid}/task").iterdir()):
            if time.monotonic() > deadline_s or state(pid) in "ZX":
                go_on(pid)
                return False
    except (ProcessLookupError, FileNotFoundError):
        return False
    return True


def go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def state(pid: int, thread: int | None = None) -> str:
    """Return the kernel's letter for a process or thread: T stopped, Z dead and not yet waited for, X gone."""
    text = _read(Path(f"/proc/{pid}/task/{thread or pid}/stat")).decode(errors="replace")
    return text.rpartition(")")[2].split()[0] if text else "X"


def stack(pid: int) -> list[Frame]:
    """Return all frames of all Python threads of a stopped process, by py-spy; an empty list if it cannot tell."""
    spy = Path(sys.executable).with_name("py-spy")
    command = [str(spy), "dump", "--nonblocking", "--json", "--pid", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        return []
    return [
        Frame(thread["thread_name"] or "", Path(frame["filename"]).name, frame["name"].split(".")[-1])
        for thread in json.loads(done.stdout)
        for frame in thread["frames"]
    ]


def _is(pid: int, actor: Actor) -> bool:
    name = title(pid)
    if actor.role in TITLES:
        right = name.startswith(TITLES[actor.role]) and state(pid) not in "ZX"
        return right and (actor.role is not Role.SHARD or shard_number(pid) == actor.number)
    if actor.role in RAYLET_ENDS_WITH:
        return name.startswith(RAYLET_ENDS_WITH[actor.role]) and state(pid) not in "ZX"
    if actor.role in SCRIPTS:
        return any(word.endswith(SCRIPTS[actor.role]) for word in name.split(" ")) and state(pid) not in "ZX"
    return Path(name.split(" ")[0]).name == actor.role.value and state(pid) not in "ZX"


def _content(name: str) -> str:
    """Return what an arena holds, by its name.

    `megatrain-<run>-words (deleted)` holds words, `state-0` shard 0's state.
    """
    name = name.split(" ")[0]
    return name.split("-", 2)[2] if name.startswith("megatrain-") else name


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
