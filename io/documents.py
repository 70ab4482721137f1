"""Text files as documents: a .txt file is one document."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from megatrain_ray.errors import ConfigError


def find_documents(path: str | Sequence[str]) -> tuple[Path, ...]:
    """The files of `data.path`: a path, a glob, or a list of these. In the order given; a glob's matches are sorted.

    Raises ConfigError for a path that is missing, a folder or no .txt file, a glob without match, and an empty list.
    """
    patterns = [path] if isinstance(path, str) else list(path)
    if not patterns:
        raise ConfigError("data.path: expected at least one .txt file, got an empty list")
    files = [file for pattern in patterns for file in _expand(pattern)]
    for file in files:
        _check_format(file)
    return tuple(files)


def read_document(file: Path) -> str:
    """The text of a file, line ends untouched. Raises ConfigError where it cannot be read or is not UTF-8."""
    try:
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.path: {file} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}; "
            "convert the file to UTF-8"
        ) from None


def _expand(pattern: str) -> list[Path]:
    if Path(pattern).exists():
        return [Path(pattern)]
    if not glob.has_magic(pattern):
        raise ConfigError(f"data.path: no such file: {pattern} (relative paths start at {Path.cwd()})")
    matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - Path.glob refuses absolute patterns
    if not matches:
        raise ConfigError(f"data.path: no file matches {pattern} (relative paths start at {Path.cwd()})")
    return [Path(match) for match in matches]


def _check_format(file: Path) -> None:
    if file.is_dir():
        raise ConfigError(
            f"data.path: {file} is a folder; folders come with a later version: name its files, "
            f"for example {file / '*.txt'}"
        )
    if file.suffix != ".txt":
        raise ConfigError(
            f"data.path: {file} is no .txt file; other formats ({file.suffix or 'no suffix'}) come with a later "
            "version: convert it to plain UTF-8 text"
        )
