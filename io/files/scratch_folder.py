"""Makes folders in the system's temporary folder that a killed process does not leave there for ever."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.files.owned_folder import FolderKind, NotOwnedError, OwnedFolder, remove_owned


@contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """Yield a new temporary folder, which is deleted after the block. Raises DiskError if it cannot be made.

    Folders of this name that killed processes left are deleted first.
    """
    parent = Path(tempfile.gettempdir())
    for left in parent.glob(f"megatrain-{name}-*"):
        with suppress(NotOwnedError, OSError):
            remove_owned(left, FolderKind.SCRATCH)
    path = parent / f"megatrain-{name}-{secrets.token_hex(4)}"
    with explained("write", path):
        folder = OwnedFolder.make(path, FolderKind.SCRATCH)
    try:
        yield path
    finally:
        folder.remove()
