"""Reads files in /proc and /sys. `root` replaces /, so that another machine's files can be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def read_text(path: Path) -> str:
    """Return the text of a file, stripped; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def meminfo(root: Path, name: str) -> int:
    """Return a value of /proc/meminfo in bytes; 0 if the kernel does not report it."""
    lines = read_text(root / "proc/meminfo").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def cgroup_folders(root: Path, controller: str, mount: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its ancestors below `mount`, and `mount` itself.

    In a container the path may be the host's, and then it does not exist.

    controller: name of a controller of cgroup v1; "" for cgroup v2.
    """
    yield root / mount
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            inner = PurePosixPath(path.lstrip("/"))
            yield from (root / mount / folder for folder in (inner, *inner.parents) if folder.name)
