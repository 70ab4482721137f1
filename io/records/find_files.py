"""Finds the files that `data.path` means and knows their formats."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from megatrain_ray.errors import ConfigError

TEXT, JSONL, JSONL_ZST, PARQUET = ".txt", ".jsonl", ".jsonl.zst", ".parquet"
SUFFIXES = (TEXT, JSONL, JSONL_ZST, PARQUET)


def format_of(file: Path) -> str | None:
    """Return the one of SUFFIXES that a file's name ends with, in small or capital letters; None for another suffix."""
    return next((suffix for suffix in SUFFIXES if file.name.lower().endswith(suffix)), None)


def find_documents(path: str | Sequence[str]) -> tuple[Path, ...]:
    """Return the files of `data.path`: a path, a glob, a folder, or a list of these.

    They come in the order given. The files of a glob or a folder are sorted by path, each named once. Of a folder these
    are the files of a known format at any depth. Files whose names begin with a dot are left out, and so is everything
    in such folders.

    Raises ConfigError for what is missing, a file of another format, a folder or glob that yields nothing, and an
    empty list.
    """
    patterns = [path] if isinstance(path, str) else list(path)
    if not patterns:
        raise ConfigError("data.path: expected at least one file, got an empty list")
    return tuple(file for pattern in patterns for file in _expand(pattern))


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.is_dir() and not _inside(path):
        raise ConfigError(f"data.path: the folder {path} holds no file of a known format ({', '.join(SUFFIXES)})")
    if path.exists():
        return _files(path)
    if not glob.has_magic(pattern):
        raise ConfigError(f"data.path: no such file: {pattern} (relative paths start at {Path.cwd()})")
    matches = sorted(map(Path, glob.glob(pattern, recursive=True)))  # noqa: PTH207 - Path.glob refuses absolute ones
    files = sorted({file for match in matches for file in _files(match)})
    if not files:
        raise ConfigError(f"data.path: no file matches {pattern} (relative paths start at {Path.cwd()})")
    return files


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return _inside(path)
    _check_format(path)
    return [path]


def _inside(folder: Path) -> list[Path]:
    files = (file for file in folder.rglob("*") if format_of(file) and not _is_hidden(file.relative_to(folder)))
    return sorted(file for file in files if file.is_file())


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _check_format(file: Path) -> None:
    if format_of(file) is None:
        raise ConfigError(
            f"data.path: {file} is of no known format ({file.suffix or 'no suffix'}); expected one of "
            f"{', '.join(SUFFIXES)}: convert it, or rename it if it is one of these"
        )
