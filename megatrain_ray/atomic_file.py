"""Small text files that are the old one or the new one, whatever happens in between."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from megatrain_ray.io.disk_errors import explained
from megatrain_ray.io.durable import sync


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """`text`: whole or in parts. Durable on return. Killed meanwhile it leaves the old file, and beside it what
    `temporary_of` names. Raises MegatrainError."""
    temporary = temporary_of(path)
    with explained("write", path):
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)


def temporary_of(path: Path) -> Path:
    return path.with_name(path.name + ".new")
