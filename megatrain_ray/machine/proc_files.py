"""Files of /proc and /sys that say what a machine has. `root` stands for /: of a machine that is not here, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def read_text(path: Path) -> str:
    """Of a file of /proc or /sys, stripped; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cgroup_folders(root: Path, controller: str, mount: str) -> Iterator[Path]:
    """Of this process's own cgroup up to the outermost. `controller`: "" for cgroup v2. In a container the path may be
    the host's, which is not there."""
    yield root / mount
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            inner = PurePosixPath(path.lstrip("/"))
            yield from (root / mount / folder for folder in (inner, *inner.parents) if folder.name)
