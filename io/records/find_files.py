"""Finds the files that `data.path` means."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.file_formats import TEXT_SUFFIXES, describe_suffixes, suffix_of
from megatrain_ray.read_file import parse_json

NUM_SHOWN = 3  # files that a note names
# What `save_to_disk` of the datasets library writes beside its tables, and a folder that holds several such folders.
STATE_NAME, SPLITS_NAME = "state.json", "dataset_dict.json"
METADATA = (STATE_NAME, SPLITS_NAME, "dataset_info.json", "dataset_infos.json")
SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])")  # begins the names of a data set's files


def find_files(path: str | Sequence[str], suffixes: Sequence[str] = TEXT_SUFFIXES) -> tuple[Path, ...]:
    """Return the files of `data.path`: a path, a glob, a folder, or a list of these.

    They come in the order given. The files of a glob or a folder are sorted by path, each named once. Of a folder these
    are the files of a known format at any depth. Files whose names begin with a dot are left out, and so is everything
    in such folders: a folder that was downloaded from a hub has a .cache of JSON files. Of a folder of `save_to_disk`
    these are the files that its state.json names.

    suffixes: the known formats.

    Raises ConfigError for what is missing, a file of another format, a folder or glob that yields nothing, a folder of
    several splits, and an empty list.
    """
    if not path:
        raise ConfigError("data.path: expected at least one file, got an empty list")
    return tuple(file for pattern in _listed(path) for file in _expand(pattern, suffixes))


def describe_folders(path: str | Sequence[str], suffixes: Sequence[str] = TEXT_SUFFIXES) -> Iterator[str]:
    """Yield a note for each folder of `data.path` with files of other formats, or with files of several splits."""
    for folder in (path for pattern in _listed(path) for path in _matches(pattern) if path.is_dir()):
        if is_saved_dataset(folder):
            continue
        found = list(_visible(folder))
        passed_over = sorted(f for f in found if suffix_of(f) not in suffixes and f.name not in METADATA)
        if passed_over:
            names = ", ".join(str(file.relative_to(folder)) for file in passed_over[:NUM_SHOWN])
            more = f" and {len(passed_over) - NUM_SHOWN} more" if len(passed_over) > NUM_SHOWN else ""
            yield f"note: {folder}: files of other formats are not read: {names}{more}"
        splits = {split[1]: file for file in sorted(found) if (split := SPLIT.match(file.name)) and suffix_of(file)}
        if len(splits) > 1:
            name = "train" if "train" in splits else min(splits)
            yield (
                f"note: {folder}: files of several splits are read ({', '.join(sorted(splits))}); to read one, name "
                f"its files: {splits[name].parent / name}*"
            )


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `save_to_disk` of the datasets library wrote the folder: one data set, or one of each split."""
    return (folder / STATE_NAME).is_file() or (folder / SPLITS_NAME).is_file()


def _listed(path: str | Sequence[str]) -> list[str]:
    return [path] if isinstance(path, str) else list(path)


def _expand(pattern: str, suffixes: Sequence[str]) -> list[Path]:
    path = Path(pattern)
    if path.exists():
        files = _files(path, suffixes)
        if not files:
            raise ConfigError(
                f"data.path: the folder {path} holds no file of a known format: {describe_suffixes(suffixes)}"
            )
        return files
    if not glob.has_magic(pattern):
        raise ConfigError(f"data.path: no such file: {pattern} (relative paths start at {Path.cwd()})")
    files = sorted({file for match in _matches(pattern) for file in _files(match, suffixes)})
    if not files:
        raise ConfigError(f"data.path: no file matches {pattern} (relative paths start at {Path.cwd()})")
    return files


def _matches(pattern: str) -> list[Path]:
    if Path(pattern).exists():
        return [Path(pattern)]
    return list(map(Path, glob.glob(pattern, recursive=True)))  # noqa: PTH207 - Path.glob refuses absolute ones


def _files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the path itself, or the files of a folder. Raises ConfigError for a file of an unknown format."""
    if path.is_dir():
        if is_saved_dataset(path):
            return _saved_files(path)
        return sorted(file for file in _visible(path) if suffix_of(file) in suffixes and file.name not in METADATA)
    if suffix_of(path) not in suffixes:
        raise unknown_format(str(path), suffixes)
    return [path]


def unknown_format(file: str, suffixes: Sequence[str] = TEXT_SUFFIXES) -> ConfigError:
    """Return the error about a file that is named and has no suffix of a known format."""
    return ConfigError(
        f"data.path: {file} is of no known format ({Path(file).suffix or 'no suffix'}); expected one of "
        f"{describe_suffixes(suffixes)}: convert it, or rename it if it is one of these"
    )


def _visible(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder at any depth, without hidden ones."""
    for file in folder.rglob("*"):
        if not any(part.startswith(".") for part in file.relative_to(folder).parts) and file.is_file():
            yield file


def _saved_files(folder: Path) -> list[Path]:
    """Return the tables of a data set in their order. Transformations of it leave others in the folder.

    Raises ConfigError for a folder of several splits, and for a damaged one.
    """
    state = folder / STATE_NAME
    try:
        if not state.is_file():
            splits = parse_json((folder / SPLITS_NAME).read_bytes())["splits"]
            if len(splits) == 1:
                return _saved_files(folder / splits[0])
            names = ", ".join(splits)
            raise ConfigError(
                f"data.path: {folder} holds the splits {names}; name one of them, as in {folder / splits[0]}"
            )
        return [folder / str(part["filename"]) for part in parse_json(state.read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"data.path: {folder} is no whole folder of save_to_disk ({type(error).__name__}: {error}); save it again"
        ) from None
