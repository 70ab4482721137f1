"""Identifies processes of this machine even after the kernel has reused their pids."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PidNamespace:
    """Identifies the namespace in which a pid is valid: one boot of one machine, and one container on it."""

    host: str
    boot_id: str
    pid_namespace: str

    @staticmethod
    def current() -> PidNamespace:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return PidNamespace(platform.node(), boot_id, str(Path("/proc/self/ns/pid").readlink()))

    @property
    def is_current(self) -> bool:
        """Return whether its pids can be looked up from here. The host's name is not compared: it may have changed."""
        here = PidNamespace.current()
        return (self.boot_id, self.pid_namespace) == (here.boot_id, here.pid_namespace)


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in kernel clock ticks since boot; None if there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the process name before may contain spaces and brackets
    return None if state in "ZX" else int(fields[18])
