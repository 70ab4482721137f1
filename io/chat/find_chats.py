"""Finds the files that hold chats and how they hold them: paths, folders, globs, or a dataset_info.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.conversation_formats import (
    CHOSEN,
    LAYOUTS,
    MESSAGE_ROLES,
    REJECTED,
    SHAREGPT_ROLES,
    AlpacaLayout,
    ChatFormat,
    ChatLayout,
    TurnsLayout,
)
from megatrain_ray.io.chat.preferences import PairLayout, UnpairedLayout
from megatrain_ray.io.records.file_formats import RECORD_SUFFIXES
from megatrain_ray.io.records.find_files import find_files, is_saved_dataset
from megatrain_ray.read_file import parse_json, regular_file

# learned: they are learned; preferred: one of two is; labelled: some are good, others bad.
Answers = Literal["learned", "preferred", "labelled"]
LAYOUT_OF: Mapping[Answers, Callable[[ChatLayout], ChatLayout | PairLayout | UnpairedLayout]] = {
    "learned": lambda layout: layout, "preferred": PairLayout, "labelled": UnpairedLayout,
}  # fmt: skip


class ChatSource(NamedTuple):
    """Holds a file of records, or a folder of such files, and the layout of their conversations.

    dataset: its name in a dataset_info.json.
    images: key under which a record lists its images there; None: a usual one.
    """

    file: Path
    layout: ChatLayout | PairLayout | UnpairedLayout
    dataset: str | None = None
    images: str | None = None


def find_chats(
    path: str | Sequence[str], dataset: str | Sequence[str] | None = None, chat_format: ChatFormat = "auto", *,
    answers: Answers = "learned",
) -> tuple[ChatSource, ...]:  # fmt: skip
    """Return the files of `data.path` in the order given: files, folders, globs, or one dataset_info.json.

    dataset: names of the entries of dataset_info.json; None with other paths.
    answers: what the records say of their answers.

    Raises ConfigError as find_files, and if `dataset` and the path do not belong together.
    """
    patterns = [path] if isinstance(path, str) else list(path)
    infos = [pattern for pattern in patterns if Path(pattern).name == FILE_NAME]
    if infos and len(patterns) == 1:
        names = [dataset] if isinstance(dataset, str) else dataset or ()
        named = read_dataset_info(Path(infos[0]), names, answers)
        return tuple(entry._replace(file=file) for entry in named for file in _files(str(entry.file)))
    if infos or dataset is not None:
        raise ConfigError(f"data.path: data.dataset goes with one {FILE_NAME} and nothing else, got {path!r}")
    layout = LAYOUT_OF[answers](LAYOUTS[chat_format])
    return tuple(ChatSource(file, layout) for pattern in patterns for file in _files(pattern))


def _files(pattern: str) -> tuple[Path, ...]:
    if (Path(pattern) / FILE_NAME).exists() and not is_saved_dataset(Path(pattern)):
        raise ConfigError(f"data.path: {pattern} holds a {FILE_NAME}: name that file, and data.dataset")
    return find_files(pattern, RECORD_SUFFIXES)


FILE_NAME = "dataset_info.json"
HUB_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
KNOWN_KEYS = {
    "file_name", "formatting", "columns", "tags", "split", "subset", "folder", "ranking", "num_samples", *HUB_KEYS,
}  # fmt: skip
KTO_TAG = "kto_tag"  # the column of labels
ALPACA_COLUMNS = ("prompt", "query", "response", "system", "history", "tools")
TURN_COLUMNS = ("messages", "system", "tools")
ROLE_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}


def read_dataset_info(file: Path, names: Sequence[str], answers: Answers) -> tuple[ChatSource, ...]:
    """Return the data sets of these names. Raises ConfigError, naming entry and key, for what cannot be read."""
    try:
        entries = parse_json(regular_file(file).read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.path: cannot read {file}: {error}") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"data.path: {file}: expected a mapping from names to data sets")
    known = ", ".join(entries) or "none"
    if not names:
        raise ConfigError(f"data.dataset: required with {file}; it holds {known}")
    if missing := [name for name in names if name not in entries]:
        raise ConfigError(f"data.dataset: {missing[0]} is not in {file}; it holds {known}")
    return tuple(_DatasetEntry(file, name, entries[name], answers).dataset() for name in names)


class _DatasetEntry(NamedTuple):
    file: Path
    name: str
    settings: Any
    answers: Answers

    def dataset(self) -> ChatSource:
        settings = self._mapping(self.settings, "the entry")
        if hub := [key for key in HUB_KEYS if key in settings]:
            raise self._error(
                f"{hub[0]} points to a hub; name {settings[hub[0]]} as data.path itself, if its columns have usual "
                "names, or download the data and name it by file_name"
            )
        if settings.get("num_samples"):
            raise self._error("num_samples cannot be followed here; remove the key")
        columns = dict(self._mapping(settings.get("columns", {}), "columns"))
        if bool(settings.get("ranking")) != (self.answers == "preferred"):
            stated = "true, so it holds preferences: set data.kind: pairs" if settings.get("ranking") else "not true"
            raise self._error(f"ranking is {stated}")
        if (KTO_TAG in columns) != (self.answers == "labelled"):
            stated = f"{KTO_TAG} is there, so it holds labelled answers: set data.kind: unpaired"
            raise self._error(f"columns: {stated if KTO_TAG in columns else f'no {KTO_TAG}'}")
        if unknown := sorted(settings.keys() - KNOWN_KEYS):
            raise self._error(f"unknown key {unknown[0]}; expected file_name, formatting, columns, tags")
        if not isinstance(name := settings.get("file_name"), str):
            raise self._error(f"file_name: expected the name of a file, got {name!r}")
        taken = {"learned": (), "preferred": (CHOSEN, REJECTED), "labelled": (KTO_TAG,)}[self.answers]
        if not isinstance(images := columns.pop("images", None), str | None):
            raise self._error(f"columns: images: expected the name of a column, got {images!r:.60}")
        layout: Any = self._layout(settings, {key: columns[key] for key in columns if key not in taken})
        if taken:
            layout = LAYOUT_OF[self.answers](layout, *(str(columns.get(key, key)) for key in taken))
        return ChatSource(self.file.parent / name, layout, self.name, images)

    def _layout(self, settings: Mapping[str, Any], columns: Mapping[str, str]) -> ChatLayout:
        formatting = settings.get("formatting", "alpaca")
        tags = self._mapping(settings.get("tags", {}), "tags")
        if formatting == "alpaca":
            self._check(columns, ALPACA_COLUMNS, "columns")
            return AlpacaLayout(*map(columns.get, ALPACA_COLUMNS)) if columns else AlpacaLayout()
        if formatting == "sharegpt":
            return self._turns(columns, tags, role="from", content="value", roles=SHAREGPT_ROLES)
        if formatting == "openai":
            roles = {**MESSAGE_ROLES, "function_call": "function_call", "observation": "tool"}
            return self._turns(columns, tags, role="role", content="content", roles=roles)
        raise self._error(f"formatting: expected alpaca, sharegpt or openai, got {formatting!r}")

    def _turns(
        self, columns: Mapping[str, str], tags: Mapping[str, str], *, role: str, content: str, roles: Mapping[str, str]
    ) -> TurnsLayout:
        self._check(columns, TURN_COLUMNS, "columns")
        self._check(tags, ("role_tag", "content_tag", *ROLE_TAGS), "tags")
        return TurnsLayout(
            turns=columns.get("messages", "conversations"),
            role=tags.get("role_tag", role),
            content=tags.get("content_tag", content),
            roles={**roles, **{tags[key]: word for key, word in ROLE_TAGS.items() if key in tags}},
            system=columns.get("system"),
            tools=columns.get("tools"),
        )

    def _check(self, given: Mapping[str, Any], expected: Sequence[str], what: str) -> None:
        for key, value in given.items():
            if key not in expected or not isinstance(value, str):
                raise self._error(f"{what}: {key}: {value!r} has no meaning here; expected {', '.join(expected)}")

    def _mapping(self, value: Any, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._error(f"{what}: expected a mapping, got {value!r:.60}")
        return value

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"data.dataset: {self.name} in {self.file}: {problem}")
