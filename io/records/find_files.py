"""Finds the files that `data.path` means and knows their formats."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from megatrain_ray.errors import ConfigError

TEXT, JSON, JSONL, JSONL_ZST, PARQUET = ".txt", ".json", ".jsonl", ".jsonl.zst", ".parquet"
TEXT_SUFFIXES = (TEXT, JSONL, JSONL_ZST, PARQUET)  # of files that hold texts
RECORD_SUFFIXES = (JSON, JSONL, JSONL_ZST, PARQUET)  # of files that hold chats or token ids


def format_of(file: Path) -> str | None:
    """Return the known suffix that a file's name ends with, in small or capital letters; None for another suffix."""
    suffixes = (TEXT, *RECORD_SUFFIXES)
    return next((suffix for suffix in suffixes if file.name.lower().endswith(suffix)), None)


def find_files(path: str | Sequence[str], suffixes: Sequence[str] = TEXT_SUFFIXES) -> tuple[Path, ...]:
    """Return the files of `data.path`: a path, a glob, a folder, or a list of these.

    They come in the order given. The files of a glob or a folder are sorted by path, each named once. Of a folder these
    are the files of a known format at any depth. Files whose names begin with a dot are left out, and so is everything
    in such folders: a folder that was downloaded from a hub has a .cache of JSON files.

    suffixes: the known formats.

    Raises ConfigError for what is missing, a file of another format, a folder or glob that yields nothing, and an
    empty list.
    """
    patterns = [path] if isinstance(path, str) else list(path)
    if not patterns:
        raise ConfigError("data.path: expected at least one file, got an empty list")
    return tuple(file for pattern in patterns for file in _expand(pattern, suffixes))


def _expand(pattern: str, suffixes: Sequence[str]) -> list[Path]:
    path = Path(pattern)
    if path.exists():
        files = _files(path, suffixes)
        if not files:
            raise ConfigError(f"data.path: the folder {path} holds no file of a known format ({', '.join(suffixes)})")
        return files
    if not glob.has_magic(pattern):
        raise ConfigError(f"data.path: no such file: {pattern} (relative paths start at {Path.cwd()})")
    matches = map(Path, glob.glob(pattern, recursive=True))  # noqa: PTH207 - Path.glob refuses absolute ones
    files = sorted({file for match in matches for file in _files(match, suffixes)})
    if not files:
        raise ConfigError(f"data.path: no file matches {pattern} (relative paths start at {Path.cwd()})")
    return files


def _files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the path itself, or the files of a folder. Raises ConfigError for a file of an unknown format."""
    if path.is_dir():
        files = (f for f in path.rglob("*") if format_of(f) in suffixes and f.is_file())
        return sorted(f for f in files if not any(part.startswith(".") for part in f.relative_to(path).parts))
    if format_of(path) not in suffixes:
        raise ConfigError(
            f"data.path: {path} is of no known format ({path.suffix or 'no suffix'}); expected one of "
            f"{', '.join(suffixes)}: convert it, or rename it if it is one of these"
        )
    return [path]
