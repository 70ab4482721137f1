"""The arena owner: creates what processes share and holds it, so that any of them may die and attach again.

All other processes of a run wait for it, so it imports no PyTorch, which takes 2 s.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatrain_ray.engine.deadlines import DEADLINE_S
from megatrain_ray.io.arena import ArenaHandle
from megatrain_ray.io.arena_holder import ArenaHolder, Handles
from megatrain_ray.io.spill_file import SpillFile
from megatrain_ray.process_end import wait_gone


class ArenaOwner:
    """Holds file descriptors; maps nothing."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        holders: Sequence[Handles] = (),
        files: Mapping[str, SpillFile] = {},
        left: Sequence[int] = (),
    ) -> None:
        """Creates arenas of `sizes` and spill `files`; where an owner died, holds what other `holders` hold instead.
        `left`: processes of an earlier attempt, whose memory must be free before."""
        for pid in left:
            wait_gone(pid, DEADLINE_S)
        self._holder = ArenaHolder.adopt(holders) if holders else ArenaHolder.create(sizes, files)
        self._stopped = threading.Event()

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
