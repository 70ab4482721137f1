"""Finds the files that hold chats and how they hold them: paths, folders, globs, or a dataset_info.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.conversation_formats import LAYOUTS, ChatFormat, ChatLayout
from megatrain_ray.io.chat.dataset_info import FILE_NAME, read_dataset_info
from megatrain_ray.io.records.find_files import RECORD_SUFFIXES, find_files


class ChatSource(NamedTuple):
    """Holds a file of records and the layout of their conversations."""

    file: Path
    layout: ChatLayout


def find_chats(
    path: str | Sequence[str], dataset: str | Sequence[str] | None = None, chat_format: ChatFormat = "auto"
) -> tuple[ChatSource, ...]:
    """Return the files of `data.path` in the order given: files, folders, globs, or one dataset_info.json.

    dataset: names of the entries of dataset_info.json; None with other paths.

    Raises ConfigError as find_files, and if `dataset` and the path do not belong together.
    """
    patterns = [path] if isinstance(path, str) else list(path)
    infos = [pattern for pattern in patterns if Path(pattern).name == FILE_NAME]
    if infos and len(patterns) == 1:
        names = [dataset] if isinstance(dataset, str) else dataset or ()
        named = read_dataset_info(Path(infos[0]), names)
        return tuple(ChatSource(file, entry.layout) for entry in named for file in _files(str(entry.path)))
    if infos or dataset is not None:
        raise ConfigError(f"data.path: data.dataset goes with one {FILE_NAME} and nothing else, got {path!r}")
    return tuple(ChatSource(file, LAYOUTS[chat_format]) for pattern in patterns for file in _files(pattern))


def _files(pattern: str) -> tuple[Path, ...]:
    if (Path(pattern) / FILE_NAME).exists():
        raise ConfigError(f"data.path: {pattern} holds a {FILE_NAME}: name that file, and data.dataset")
    return find_files(pattern, RECORD_SUFFIXES)
