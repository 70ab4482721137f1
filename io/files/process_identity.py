"""Identifies processes of this machine even after the kernel has used their pids again."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PidNamespace:
    """Names the namespace in which a pid means something: one boot of one machine, and one container of it."""

    host: str
    boot_id: str
    pid_namespace: str

    @staticmethod
    def current() -> PidNamespace:
        """Return the namespace of this process."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return PidNamespace(platform.node(), boot_id, str(Path("/proc/self/ns/pid").readlink()))

    @property
    def is_current(self) -> bool:
        """Whether pids of this namespace can be looked up from here. The host's name may have changed."""
        here = PidNamespace.current()
        return (self.boot_id, self.pid_namespace) == (here.boot_id, here.pid_namespace)


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in ticks of the kernel's clock since boot; no change of the wall clock moves it.

    None when there is no such process, or only a zombie, which holds nothing.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before may hold anything, spaces and brackets too
    return None if state in "ZX" else int(fields[18])
