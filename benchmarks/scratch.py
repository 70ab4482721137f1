"""Makes the folders of benchmarks, deletes only those that a benchmark made, and reads a process's memory."""

from __future__ import annotations

import sys
from pathlib import Path

from megatrain_ray.io.files.owned_folder import (
    MARK_NAME,
    SHARED,
    FolderKind,
    NotOwnedError,
    OwnedFolder,
    is_free,
    remove_owned,
)


def fresh(folder: Path) -> Path:
    """Make `folder` anew, after deleting what an earlier benchmark made of that name; return a path in it that is free.

    Ends the program where something else has the name.
    """
    try:
        if not is_free(folder):
            if others := {path.name for path in folder.iterdir()} - {MARK_NAME, "run", "exported"}:
                sys.exit(f"{folder} holds {', '.join(sorted(others))}, which no benchmark made: move that away")
            remove_owned(folder, FolderKind.SCRATCH)
    except NotOwnedError as error:
        sys.exit(f"{error}; move it away, then start again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    OwnedFolder.make(folder, FolderKind.SCRATCH, mode=SHARED).release()
    return folder / "run"


def memory(name: str) -> int:
    """Return the bytes that /proc/self/status has under this name, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
