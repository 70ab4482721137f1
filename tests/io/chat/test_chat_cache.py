"""Chats in the cache of tokens: what lies there, what names the folder, and what is told."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_worker import open_stream
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.corpus import open_corpus
from megatrain_ray.io.chat.chat_recipe import ChatRecipe
from megatrain_ray.io.chat.chat_template import load_chat_template
from megatrain_ray.io.chat.find_chats import find_chats
from megatrain_ray.io.tokens.token_cache import find_tokens, key_of, make_tokens, provenance_of
from megatrain_ray.io.tokens.token_files import TokenMeta
from tests.support.texts import tokens_of

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '#' if m.role == 'assistant' else ':' }}{% endfor %}"  # Q:A#


def record(*contents: str) -> str:
    roles = ("user", "assistant")
    return json.dumps({"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]})


class Silent:
    """A watcher that checks nothing but the order of what is reported."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def wait(self, folder: Path) -> None: ...

    def replace(self, folder: Path) -> None: ...

    def advance(self, read_bytes: int, total_bytes: int) -> None:
        self.read.append(read_bytes)
        assert 0 < read_bytes <= total_bytes

    def end(self, meta: TokenMeta, seconds: float) -> None: ...


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def recipe(tmp_path: Path) -> ChatRecipe:
    (tmp_path / "a.jsonl").write_text(record("q", "ab") + "\n" + record("no answer") + "\n")
    (tmp_path / "b.jsonl").write_text(record("q", "cd", "rr", "e"))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    template = load_chat_template("bytes", str(tmp_path / "t.jinja"))
    return ChatRecipe(find_chats([str(tmp_path / "*.jsonl")]), "bytes", template, "turn", 20, "error")


def test_ids_lengths_and_the_mask(recipe: ChatRecipe, root: Path) -> None:
    watch = Silent()
    folder = make_tokens(recipe, root, 257, watch)
    corpus = open_corpus("chats", folder, 257)
    text = b"q:ab#q:cd#rr:e#"
    assert bytes(corpus.tokens.tolist()) == text
    assert corpus.document_lengths.tolist() == [5, 10]
    assert corpus.loss_weights is not None
    shown = "".join(chr(c) if on else "." for c, on in zip(text, corpus.loss_weights, strict=True))
    assert shown == "..ab#..cd#...e#"
    mask = np.array([letter != "." for letter in shown])
    parts = np.array(list(text), np.uint16), np.array([5, 10], np.int64), mask
    crc32 = 0
    for part in parts:
        crc32 = zlib.crc32(part.tobytes(), crc32)
    assert corpus.fingerprint.crc32 == crc32
    assert watch.read == [sum(source.file.stat().st_size for source in recipe.sources)]


def test_they_are_made_once(recipe: ChatRecipe, root: Path) -> None:
    folder = make_tokens(recipe, root, 257, Silent())
    again = Silent()
    assert make_tokens(recipe, root, 257, again) == folder == find_tokens(recipe, root)
    assert again.read == []
    (folder / "supervised.bin").write_bytes(b"\0")
    assert find_tokens(recipe, root) is None
    assert make_tokens(recipe, root, 257, again) == folder
    assert len(again.read) == 1


def test_whatever_goes_into_them_names_the_folder(recipe: ChatRecipe, tmp_path: Path) -> None:
    files = [str(source.file) for source in recipe.sources]
    template = recipe.template
    info = {name: {"file_name": "a.jsonl", "columns": {"response": name}} for name in ("one", "two")}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    changes: list[dict[str, Any]] = [
        {},
        {"sources": recipe.sources[::-1]},
        {"sources": find_chats(files, None, "messages")},
        {"sources": find_chats(files, None, "sharegpt")},
        {"sources": find_chats(str(tmp_path / "dataset_info.json"), "one")},
        {"sources": find_chats(str(tmp_path / "dataset_info.json"), "two")},
        {"template": replace(template, source=template.source + " ")},
        {"template": replace(template, tool_use="x")},
        {"template": replace(template, variables={"enable_thinking": False})},
        {"truncation": "drop"},
        {"seq_len": 21},
        {"bad_records": "skip"},
        {"learn": "last"},
        {"learn_reasoning": False},
    ]
    keys = [key_of(provenance_of(replace(recipe, **change))) for change in changes]
    assert len(set(keys)) == len(changes)
    assert key_of(provenance_of(replace(recipe, template=replace(template, name="moved")))) == keys[0]
    os.utime(recipe.sources[0].file, ns=(1, 1))
    assert key_of(provenance_of(recipe)) != keys[0]


def test_sets_in_a_layout_stand_sorted(recipe: ChatRecipe) -> None:
    """Their own order is another one in each process."""
    messages = replace(recipe, sources=find_chats(str(recipe.sources[0].file), None, "messages"))
    extras = messages.settings()["layouts"][0][1]["extras"]
    assert extras == sorted(extras)
    assert len(extras) > 3


def test_an_id_outside_of_the_vocabulary_names_its_place(recipe: ChatRecipe, root: Path) -> None:
    message = r"a\.jsonl, line 1 has token id 113, but the model's vocab_size is 113; use"
    with pytest.raises(ConfigError, match=message):
        make_tokens(recipe, root, 113, Silent())
    assert list(root.iterdir()) == []
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 1 has token id 114, but the model's vocab_size is 114; use"):
        make_tokens(recipe, root, 114, Silent())
    folder = make_tokens(recipe, root, 115, Silent())
    with pytest.raises(ConfigError, match=r"b\.jsonl has token id 114, .* is 114"):
        open_corpus("chats", folder, 114)


# --- in the driver ---


def data_of(recipe: ChatRecipe, **changes: Any) -> DataConfig:
    tree = {
        "kind": "sft",
        "path": [str(source.file) for source in recipe.sources],
        "tokenizer": "bytes",
        "chat_template": recipe.template.name,
        "seq_len": 20,
        **changes,
    }
    return DataConfig.model_validate(tree)


@pytest.fixture
def told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return lambda: capsys.readouterr().err.splitlines()


def test_it_says_at_each_start_what_became_of_the_records(
    recipe: ChatRecipe, tmp_path: Path, told: Callable[[], list[str]]
) -> None:
    tokens_of(data_of(recipe), tmp_path)
    first, second, third = told()
    assert first.startswith(f"tokenized {tmp_path / 'a.jsonl'}, {tmp_path / 'b.jsonl'}: 2 sequences, 15 tokens in 0.")
    assert second == "3 records: 2 sequences, 15 tokens, 8 of them learned"
    assert third == f"1 without an assistant turn, dropped ({tmp_path / 'a.jsonl'}, line 2)"
    tokens_of(data_of(recipe), tmp_path)
    named = f"the tokens of {tmp_path / 'a.jsonl'}, {tmp_path / 'b.jsonl'} are in the cache: "
    assert told() == [named + second, third]


def test_sources_with_weights_and_a_named_data_set(
    recipe: ChatRecipe, tmp_path: Path, told: Callable[[], list[str]]
) -> None:
    files = [str(source.file) for source in recipe.sources]
    weighted = data_of(recipe, path=[{"path": file, "weight": 1} for file in files], packing=False)
    batch = open_stream(weighted, tokens_of(weighted, tmp_path), 257, 2).next_batch()
    assert [bytes(ids[:2].tolist()) for ids in batch.input_ids] == [b"q:", b"q:"]
    assert batch.num_supervised == 3 + 5
    (tmp_path / "c.json").write_text('[{"question": "Q", "answer": "A"}]')
    columns = {"prompt": "question", "response": "answer"}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "c.json", "columns": columns}}))
    named = data_of(recipe, path=str(tmp_path / "dataset_info.json"), dataset="mine")
    assert open_corpus("mine", *tokens_of(named, tmp_path), 257).tokens.tolist() == list(b"Q:A#")


def test_chats_share_a_row_or_have_one_each(recipe: ChatRecipe, tmp_path: Path, told: Callable[[], list[str]]) -> None:
    folders = tokens_of(data_of(recipe), tmp_path)
    packed = open_stream(data_of(recipe), folders, 257, 1)
    assert packed.joins_documents
    batch = packed.next_batch()
    assert batch.positions is not None
    assert (batch.positions.tolist(), batch.num_supervised) == ([[*range(5), *range(10), *range(5)]], 8)
    alone = open_stream(data_of(recipe, packing=False), folders, 257, 2)
    assert not alone.joins_documents
    batch = alone.next_batch()
    assert (batch.positions, batch.num_supervised) == (None, 8)
