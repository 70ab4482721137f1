"""A folder in which configurations of other tools find what they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.chat_fixtures import FAMILIES, build
from tests.support.tiny import build_tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a model, its tokenizer, and data sets of 7 and 3 chats."""
    monkeypatch.chdir(tmp_path)
    build(build_tiny(tmp_path / "model", vocab_size=320), FAMILIES["qwen2.5"])
    chats = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * n}]} for n in range(1, 8)
    ]
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (tmp_path / "data").mkdir()
    facts = [{"instruction": "q", "output": str(n)} for n in range(3)]
    (tmp_path / "data" / "facts.json").write_text(json.dumps(facts))
    (tmp_path / "data" / "dialogues.json").write_text(json.dumps(chats))
    info = {
        "facts": {"file_name": "facts.json"},
        "dialogues": {"file_name": "dialogues.json", "formatting": "openai", "columns": {"messages": "messages"}},
        "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "body"}},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path
