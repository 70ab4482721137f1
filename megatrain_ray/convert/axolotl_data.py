"""Translates Axolotl's lists of data sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain_ray.convert.key_tables import RefusedError

# Type of a data set: the corresponding data.kind and data.chat_format.
TYPES = {
    "completion": ("pretrain", None),
    "pretrain": ("pretrain", None),
    "alpaca": ("sft", "alpaca"),
    "sharegpt": ("sft", "sharegpt"),
    "chat_template": ("sft", None),
    "": ("tokens", None),
}
# Keys of a data set, and values of them that change nothing. None: any value is accepted.
HARMLESS: Mapping[str, tuple[Any, ...] | None] = {
    "path": None, "type": None, "data_files": None, "field": None, "text_column": None, "ds_type": None, "name": None,
    "split": ("train",),
    "conversation": None,
    "chat_template": None,
    "trust_remote_code": None,
    "revision": None,
    "field_messages": ("messages", "conversations"),
    "field_tools": ("tools",),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "message_property_mappings": ({"role": "role", "content": "content"}, {"role": "from", "content": "value"}),
    "roles_to_train": (["assistant"], ["gpt", "assistant"], ["assistant", "gpt"]),
    "train_on_eos": ("turn",),
    "roles": (
        {"assistant": ["gpt", "assistant"], "user": ["human", "user"], "system": ["system"], "tool": ["tool"]},
        {"assistant": ["gpt", "model", "assistant"], "user": ["human", "user"]},
        {"assistant": ["gpt", "assistant"], "user": ["human", "user"]},
        {"assistant": ["assistant"], "user": ["user"], "system": ["system"]},
        {"assistant": ["assistant"], "user": ["user"]},
    ),
}  # fmt: skip
FILES = ("json", "parquet", "text", "csv", "arrow")  # values of `path` that name the format of data_files


def data_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the data sets, which must all be of one kind, by dotted key.

    tree: the configuration file.

    Raises RefusedError if they are missing or cannot be translated.
    """
    texts = tree.get("pretraining_dataset")
    given = texts or tree.get("datasets")
    if not given:
        raise RefusedError("datasets: are missing, and data.path is required")
    listed = given if isinstance(given, list) else [given]
    sets = [{"path": item} if isinstance(item, str) else item for item in listed]
    if texts:
        sets = [{"type": "pretrain", **item} for item in sets]
    found = _common(sets)
    if texts:
        found["data.packing"] = True
    if tests := tree.get("test_datasets"):
        found["data.eval_path"] = _common(tests)["data.path"]
    return found


def _common(sets: list[Any]) -> dict[str, Any]:
    kinds = {_kind(item) for item in sets}
    if len(kinds) > 1:
        raise RefusedError("datasets: are of several types; data of one kind are read")
    ((kind, layout),) = kinds
    paths = [path for item in sets for path in _paths(item)]
    found: dict[str, Any] = {"data.kind": kind, "data.path": paths if len(paths) > 1 else paths[0]}
    fields = {item.get("field") or item.get("text_column") or "text" for item in sets}
    if kind == "pretrain" and fields != {"text"}:
        if len(fields) > 1:
            raise RefusedError(f"datasets: texts stand under several keys ({', '.join(sorted(fields))}); one is read")
        found["data.text_field"] = fields.pop()
    if layout:
        found["data.chat_format"] = layout
    return found


def _kind(item: Any) -> tuple[str, str | None]:
    if not isinstance(item, Mapping):
        raise RefusedError(f"datasets: expected a mapping, got {item!r:.60}")
    where = f"datasets: {item.get('path')}"
    kind = item.get("type") or ""
    name = kind.partition(".")[0].partition(":")[0] if isinstance(kind, str) else None
    if name not in TYPES or (isinstance(kind, str) and name == "alpaca" and kind != "alpaca"):
        raise RefusedError(f"{where}: type: {kind}: is not here; expected one of {', '.join(filter(None, TYPES))}")
    for key, value in item.items():
        if value in (None, [], {}, False):
            continue
        if key not in HARMLESS or ((harmless := HARMLESS[key]) is not None and value not in harmless):
            raise RefusedError(f"{where}: {key}: {value!r:.60}: cannot be followed; records are read as they stand")
    return TYPES[name]


def _paths(item: Mapping[str, Any]) -> list[str]:
    path, files = str(item.get("path")), item.get("data_files")
    chosen = [files] if isinstance(files, str) else list(files or [])
    if path in FILES and chosen:
        return chosen
    if not Path(path).exists() and not Path(path).suffix:
        raise RefusedError(
            f"datasets: {path}: is no file or folder here; download it (`hf download --repo-type dataset {path}`), and "
            "name the folder"
        )
    return [str(Path(path) / file) for file in chosen] or [path]
