"""LLaMA-Factory's dataset_info.json: files, columns and tags as stated there, and entries that cannot be read here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.conversation_formats import read_conversation
from megatrain_ray.io.chat.find_chats import find_chats
from megatrain_ray.io.records.read_records import read_records


def conversations(folder: Path, entries: Any, *names: str) -> list[list[tuple[str, str]]]:
    file = folder / "dataset_info.json"
    file.write_text(json.dumps(entries))
    sources = find_chats(str(file), names or None)
    read = [read_conversation(record, s.layout).messages for s in sources for _, record in read_records(s.file)]
    return [[(m["role"], m["content"]) for m in messages] for messages in read]


def test_columns_and_tags_say_where_everything_is(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"q": "Q", "extra": "x", "r": "A", "sys": "S", "input": "not this"}]))
    chat = [{"role": "U", "text": "Q"}, {"role": "B", "text": "A"}, {"role": "O", "text": "4"}]
    (tmp_path / "b.jsonl").write_text(json.dumps({"dialog": chat, "system": "not this"}))
    tags = {"role_tag": "role", "content_tag": "text", "user_tag": "U", "assistant_tag": "B", "observation_tag": "O"}
    entries = {
        "a": {"file_name": "a.json", "columns": {"prompt": "q", "query": "extra", "response": "r", "system": "sys"}},
        "b": {"file_name": "b.jsonl", "formatting": "sharegpt", "columns": {"messages": "dialog"}, "tags": tags},
    }
    first = [("system", "S"), ("user", "Q\nx"), ("assistant", "A")]
    second = [("user", "Q"), ("assistant", "A"), ("tool", "4")]
    assert conversations(tmp_path, entries, "b", "a") == [second, first]
    assert conversations(tmp_path, entries, "a") == [first]


def test_without_columns_the_usual_keys_are_read(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.json").write_text(json.dumps([{"instruction": "Q", "input": "x", "output": "A"}]))
    (tmp_path / "b.json").write_text(json.dumps([{"conversations": [{"from": "human", "value": "Q"}]}]))
    (tmp_path / "c.json").write_text(json.dumps([{"messages": [{"role": "user", "content": "Q"}]}]))
    entries = {
        "a": {"file_name": "part"},
        "b": {"file_name": "b.json", "formatting": "sharegpt"},
        "c": {"file_name": "c.json", "formatting": "openai", "columns": {"messages": "messages"}},
    }
    user = [("user", "Q")]
    assert conversations(tmp_path, entries, "a", "b", "c") == [[("user", "Q\nx"), ("assistant", "A")], user, user]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"hf_hub_url": "some/data"}, "hf_hub_url points to a hub; name some/data as data.path"),
        ({"script_url": "x"}, "script_url points to a hub"),
        ({"file_name": "a.json", "ranking": True}, "it holds preferences: set data.kind: pairs"),
        ({"file_name": "a.json", "colums": {}}, "unknown key colums; expected file_name, formatting"),
        ({}, "file_name: expected the name of a file, got None"),
        ("a.json", "the entry: expected a mapping, got 'a.json'"),
        ({"file_name": "a.json", "formatting": "chatml"}, "expected alpaca, sharegpt or openai, got 'chatml'"),
        ({"file_name": "a.json", "columns": {"chosen": "x"}}, "columns: chosen: 'x' has no meaning here"),
        ({"file_name": "a.json", "formatting": "sharegpt", "tags": {"user": "x"}}, "tags: user: 'x' has no meaning"),
        ({"file_name": "absent.json"}, "no such file: .*absent.json"),
    ],
)
def test_an_entry_that_cannot_be_read_is_refused_by_name(tmp_path: Path, entry: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        conversations(tmp_path, {"mine": entry}, "mine")


def test_a_data_set_must_be_named_and_known(tmp_path: Path) -> None:
    entries = {"mine": {"file_name": "a.json"}, "other": {"hf_hub_url": "x/y"}}
    with pytest.raises(ConfigError, match=r"data.dataset: required with .*; it holds mine, other"):
        conversations(tmp_path, entries)
    with pytest.raises(ConfigError, match=r"data.dataset: your is not in .*; it holds mine, other"):
        conversations(tmp_path, entries, "your")
    with pytest.raises(ConfigError, match="expected a mapping from names"):
        conversations(tmp_path, [], "mine")
    with pytest.raises(ConfigError, match=r"cannot read .*dataset_info.json"):
        find_chats(str(tmp_path / "absent" / "dataset_info.json"), "mine")
    with pytest.raises(ConfigError, match=r"data.dataset goes with one dataset_info.json"):
        find_chats(str(tmp_path), "mine")
    with pytest.raises(ConfigError, match=r"holds a dataset_info.json: name that file, and data.dataset"):
        find_chats(str(tmp_path))
