"""Makes folders of benchmarks under a place that the user names, and deletes only those that a benchmark made."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatrain_ray.io.files.owned_folder import SHARED, FolderKind, NotOwnedError, OwnedFolder, remove_owned


def fresh(folder: Path) -> Path:
    """Make `folder` anew, after deleting what an earlier benchmark made of that name; return a path in it that is free.

    Ends the program where something else has the name.
    """
    try:
        if os.path.lexists(folder):
            remove_owned(folder, FolderKind.SCRATCH)
    except NotOwnedError as error:
        sys.exit(f"{error}; move it away, then start again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    OwnedFolder.make(folder, FolderKind.SCRATCH, mode=SHARED).release()
    return folder / "run"
