"""Makes folders with the mark of a process that is dead."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatrain_ray.io.files.owned_folder import MARK_NAME, FolderKind, OwnedFolder, read_mark
from megatrain_ray.io.files.process_identity import start_ticks

NO_PID = 2**22 + 1  # larger than any pid of the kernel


def left_by_a_dead_process(path: Path, kind: FolderKind = FolderKind.SCRATCH, token: str | None = None) -> Path:
    """Make the folder as a process does that is killed after it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    OwnedFolder.make(path, kind, token).release()
    forget_maker(path)
    return path


def forget_maker(path: Path) -> None:
    """Change the mark of a folder so that its maker is a process that is not there."""
    mark = read_mark(path)
    assert mark is not None
    (path / MARK_NAME).write_text(dataclasses.replace(mark, pid=NO_PID).to_json())


def made_by(pid: int) -> dict[str, Any]:
    """Return what a mark says of a living process."""
    return {"pid": pid, "start_ticks": start_ticks(pid)}
