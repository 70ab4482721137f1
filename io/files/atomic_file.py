"""Replaces small text files atomically: after a crash a file is either the old one or the new one."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.files.durable import sync

TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.new")


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Replace the file `path` by `text`, given whole or in parts. Durable on return. Raises MegatrainError.

    If the process is killed meanwhile, the old file stays, with a temporary one next to it that `left_by_kills` finds.
    """
    with explained("write", path), temporary_file(path) as temporary:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)


@contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """Yield a new empty file next to `path`. It is deleted after the block unless it was renamed. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def left_by_kills(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the temporary files of files called `names` in a folder that only this program writes."""
    wanted = set(names)
    return [
        file
        for file in sorted(folder.glob(".*.new"))
        if (match := TEMPORARY.fullmatch(file.name)) and match[1] in wanted and stat.S_ISREG(file.lstat().st_mode)
    ]
