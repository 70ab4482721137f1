"""Reads files that a user, or another program, has written: only regular ones, and JSON of any depth."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


def regular_file(path: Path) -> Path:
    """Return the path of a file, or of a link to one, before it is opened.

    Opening a pipe waits for a writer, and a device such as /dev/zero has no end. Raises OSError for anything else than
    a regular file, also for a missing one.
    """
    try:
        mode = path.stat().st_mode
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a NUL character", str(path)) from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {KINDS[stat.S_IFMT(mode)]}, expected a regular file", str(path))
    return path


def check_folder(folder: Path) -> None:
    """Raise OSError if a folder holds pipes, sockets or devices. Call it before a library reads the folder."""
    for file in sorted(folder.iterdir()):
        if file.exists() and not file.is_dir():
            regular_file(file)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is none, also if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
