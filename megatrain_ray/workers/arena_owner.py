"""The arena owner: creates what processes share and holds it, so that any of them may die and attach again.

All other processes of a run wait for it, so it imports no PyTorch, which takes 2 s.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.arenas.arena import ArenaHandle
from megatrain_ray.io.arenas.arena_holder import ArenaHolder, Handles
from megatrain_ray.io.storage.spill_file import SpillFile
from megatrain_ray.profiling.spill_folder import OtherHost, memory_warning
from megatrain_ray.run.process_end import wait_gone


class ArenaOwner:
    """Holds file descriptors; maps nothing."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        holders: Sequence[Handles] = (),
        files: Mapping[str, SpillFile] = {},
        left: Sequence[int] = (),
        other: OtherHost | None = None,
    ) -> None:
        """Creates arenas of `sizes` and spill `files`; where an owner died, holds what other `holders` hold instead.
        `left`: processes of an earlier attempt, whose memory must be free before. `other`: this host, where it is not
        the driver's. Raises ConfigError for what is wrong with spill.path on it, and MegatrainError."""
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
        """What to say where spill.path is in memory on this host; None elsewhere."""
        if self._other is None or self._other.folder is None:
            return None
        return memory_warning(self._other.folder, f" on {self._other.name}")

    def handles(self) -> dict[str, ArenaHandle]:
        """For `ArenaHolder.adopt` in any process of this machine."""
        return self._holder.handles

    def digest_of(self, path: str) -> str | None:
        """SHA-256 of a file as this host sees it; None where it sees none."""
        try:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError:
            return None

    def run(self) -> None:
        """Holds until `stop`."""
        self._stopped.wait()
        self._holder.close()

    def stop(self) -> None:
        self._stopped.set()
