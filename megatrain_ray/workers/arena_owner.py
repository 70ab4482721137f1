"""Creates the memory that processes share and holds it, so that any of them may die and its replacement attach again.

All other processes of a run wait for the arena owner, so it does not import PyTorch, which takes 2 s.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.arenas.arena_holder import ArenaHandle, ArenaHolder, Handles
from megatrain_ray.io.storage.disk_io import SpillFile
from megatrain_ray.profiling.spill_folder import OtherHost, memory_warning
from megatrain_ray.run.run_processes import wait_gone


class ArenaOwner:
    """Holds the file descriptors of a host's arenas and spill files. It maps none of them."""

    def __init__(
        self, sizes: Mapping[str, int], holders: Sequence[Handles] = (), files: Mapping[str, SpillFile] = {},
        left: Sequence[int] = (), other: OtherHost | None = None,
    ) -> None:  # fmt: skip
        """Create arenas of these sizes in bytes and spill files, or hold those that other `holders` still hold.

        left: processes of an earlier attempt, which must end first, since their memory must be free.
        other: this host; None on the driver's.

        Raises ConfigError if spill.path is wrong on this host, and MegatrainError.
        """
        for pid in left:
            wait_gone(pid, DEADLINE_S)
        self._other = other
        self._holder = ArenaHolder.adopt(holders) if holders else self._create(sizes, files)
        self._stopped = threading.Event()

    def _create(self, sizes: Mapping[str, int], files: Mapping[str, SpillFile]) -> ArenaHolder:
        if self._other is None:
            return ArenaHolder.create(sizes, files)
        self._other.check()
        try:
            return ArenaHolder.create(sizes, files)
        except MegatrainError as error:
            raise type(error)(f"{self._other.name}: {error}") from error

    def memory_warning(self) -> str | None:
        """Return a warning if spill.path is in memory on this host, or None. On the driver's host it is always None."""
        if self._other is None or self._other.folder is None:
            return None
        return memory_warning(self._other.folder, f" on {self._other.name}")

    def handles(self) -> dict[str, ArenaHandle]:
        return self._holder.handles

    def digest_of(self, path: str) -> str | None:
        """Return the SHA-256 of a file as this host sees it, or None if it cannot be read here."""
        try:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError:
            return None

    def run(self) -> None:
        """Hold arenas and files until `stop`."""
        self._stopped.wait()
        self._holder.close()

    def stop(self) -> None:
        self._stopped.set()
