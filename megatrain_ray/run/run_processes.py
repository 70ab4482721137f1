"""Names the processes of a run, and records them, so that the next start finds those that outlived their driver.

A pid alone says little, since pids are used again. A process is the recorded one if it lives in the same boot and pid
namespace, and was started at the same tick of the kernel's clock, which no change of the wall clock moves.
"""

from __future__ import annotations

import json
import logging
import os
import select
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.files.atomic_file import write_atomically
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.files.process_identity import PidNamespace, start_ticks
from megatrain_ray.read_file import parse_json, regular_file

DATA, OWNER, GPU, SHARD = "data", "arena owner", "GPU worker", "optimizer shard"  # in messages and in files of a run
PROCESSES_NAME = "processes.json"
END_S = 30.0  # Ray ends the actors of a killed driver within a few seconds
POLL_S = 0.1

log = logging.getLogger(__name__)


def gpu_name(rank: int) -> str:
    """Return the name of a GPU worker. Rank 0 has the same name as the only worker of a run with one GPU."""
    return f"{GPU} {rank}" if rank else GPU


def owner_name(host: int) -> str:
    """Return the name of a host's arena owner. On host 0 it is the same as in a run on one host."""
    return f"{OWNER} of host {host}" if host else OWNER


def shard_name(index: int) -> str:
    return f"{SHARD} {index}"


@dataclass(frozen=True)
class _RecordedProcess:
    role: str
    pid: int
    start_ticks: int  # since boot

    @property
    def lives(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


def record(path: Path, pids: Mapping[str, int]) -> None:
    """Write the processes of the run, {role: pid}, in place of what was recorded in directory `path`."""
    started = {role: start_ticks(pid) for role, pid in pids.items()}
    processes = [_RecordedProcess(role, pids[role], ticks) for role, ticks in started.items() if ticks is not None]
    values = {"place": asdict(PidNamespace.current()), "processes": [asdict(process) for process in processes]}
    write_atomically(path / PROCESSES_NAME, json.dumps(values, indent=2) + "\n")


def await_end(path: Path, timeout_s: float = END_S) -> None:
    """Wait until no process that an earlier start of the run recorded is alive. The run's lock is held.

    Raises MegatrainError naming those that still live after `timeout_s` seconds.
    """
    left = [process for process in _read(path / PROCESSES_NAME) if process.lives]
    if left:
        log.warning("waiting up to %.0f s for what an earlier start of this run left: %s", timeout_s, _named(left))
    deadline_s = time.monotonic() + timeout_s
    while left := [process for process in left if process.lives]:
        if time.monotonic() > deadline_s:
            raise MegatrainError(
                f"{path}: an earlier start of this run left processes that still live after {timeout_s:.0f} s: "
                f"{_named(left)}; they hold its memory and may write to it: end them "
                f"(kill -9 {' '.join(str(process.pid) for process in left)}), then start again"
            )
        time.sleep(POLL_S)


def living(path: Path) -> dict[str, int]:
    """Return {role: pid} of the recorded processes that are alive; empty if no run is up."""
    return {process.role: process.pid for process in _read(path / PROCESSES_NAME) if process.lives}


def forget(path: Path) -> None:
    """Delete the record, when all processes of the run have ended well. Raises MegatrainError."""
    file = path / PROCESSES_NAME
    with explained("delete", file):
        file.unlink(missing_ok=True)


def _read(file: Path) -> list[_RecordedProcess]:
    """Return the recorded processes that can be looked up from here; empty if nothing readable is recorded."""
    try:
        values = parse_json(regular_file(file).read_bytes())
        place = PidNamespace(**values["place"])
        processes = [_RecordedProcess(**process) for process in values["processes"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be read, so left processes are not looked for: %s", file, error)
        return []
    if place.is_current:
        return processes
    log.info("the last start's processes ran on %s before its restart, or in another container", place.host)
    return []


def _named(processes: list[_RecordedProcess]) -> str:
    return ", ".join(f"{process.role} (process {process.pid})" for process in processes)


def wait_gone(pid: int, timeout_s: float) -> None:
    """Wait until no process has this pid (a zombie is none). Raises DeadlineError after `timeout_s` seconds."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(fd, "rb") as process:
        poll = select.poll()
        poll.register(process, select.POLLIN)  # readable once the process has ended
        if not poll.poll(1000 * timeout_s):
            raise DeadlineError(f"process {pid}, which is to be replaced, did not end within {timeout_s:.0f} s")
