"""Labelled answers: every format as the same conversation and label, and prompts joined with answers to others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_worker import check_prompts, open_stream
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch import LABELS
from megatrain_ray.io.batching.corpus import open_corpus
from megatrain_ray.io.chat.conversation_formats import LAYOUTS
from megatrain_ray.io.chat.find_chats import find_chats
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.chat.preferences import UnpairedLayout
from megatrain_ray.io.records.read_records import RecordError, read_records
from megatrain_ray.io.tokens.token_files import read_meta
from tests.io.chat.test_chat_records import said
from tests.io.chat.test_preferences import ASKED, HISTORY, PLAIN, PROMPT, SHAREGPT
from tests.support.texts import tokens_of

SAME: dict[str, Any] = {
    "TRL": {"prompt": ASKED, "completion": said(("assistant", "B")), "label": True},
    "TRL, texts": {"prompt": ASKED, "completion": "B", "label": True},
    "TRL, implicit prompt": {"messages": [*ASKED, *said(("assistant", "B"))], "label": True},
    "the whole in the completion": {"completion": [*ASKED, *said(("assistant", "B"))], "label": True},
    "an instruction and a completion": HISTORY | {"completion": "B", "label": True},
    "LLaMA-Factory, alpaca": HISTORY | {"output": "B", "kto_tag": True},
    "LLaMA-Factory, sharegpt": {
        "conversations": [*SHAREGPT, {"from": "gpt", "value": "B"}], "system": "S", "kto_tag": True, "label": None,
    },
}  # fmt: skip


def read(record: Any) -> tuple[Conversation, bool]:
    return UnpairedLayout(LAYOUTS["auto"]).read(record)


@pytest.mark.parametrize("name", SAME)
def test_the_same_answer_in_every_format(name: str) -> None:
    for is_good in (True, False):
        key = "kto_tag" if "kto_tag" in SAME[name] else "label"
        conversation, label = read(SAME[name] | {"id": 7, key: is_good})
        assert label is is_good
        assert [(m["role"], m["content"]) for m in conversation.messages] == [*PROMPT, ("assistant", "B")]
        assert conversation.answers == [(4, 1.0)]


def test_the_prompt_may_be_a_question() -> None:
    conversation, _ = read({"system": "S", "question": "Q", "completion": "A", "label": True})
    assert [m["content"] for m in conversation.messages] == ["S", "Q", "A"]


def test_all_turns_of_a_completion_count() -> None:
    turns = said(("assistant", "B"), ("user", "R"), ("assistant", "C"))
    assert read({"prompt": "Q", "completion": turns, "label": False})[0].answers == [(1, 1.0), (3, 1.0)]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (
            {"prompt": "Q", "completion": "A"},
            "label: expected true or false: whether .*, got no such key .keys: 'prompt', 'completion'",
        ),
        ({"prompt": "Q", "completion": "A", "label": 1}, "label: expected true or false: .* got 1"),
        ({"prompt": "Q", "label": True}, "fit no known format"),
        ({"completion": "A", "label": True}, "completion: expected a list of turns, got 'A'"),
        (
            {"prompt": "Q", "completion": [{"role": "assistant", "content": "B", "weight": 0.5}], "label": True},
            "weights other than 0 and 1",
        ),
    ],
)
def test_what_is_wrong_is_named(record: Any, problem: str) -> None:
    with pytest.raises(RecordError, match=problem):
        read(record)


def test_the_column_of_labels_of_llama_factory(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"q": "Q", "a": "A", "good": False}]))
    columns = {"prompt": "q", "response": "a", "kto_tag": "good"}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"a": {"file_name": "a.json", "columns": columns}}))
    (source,) = find_chats(str(tmp_path / "dataset_info.json"), "a", answers="labelled")
    assert isinstance(source.layout, UnpairedLayout)
    ((_, record),) = read_records(source.file)
    conversation, is_good = source.layout.read(record)
    assert (conversation.messages[-1]["content"], is_good) == ("A", False)


def data_of(folder: Path, texts: Sequence[str], **settings: Any) -> DataConfig:
    """Return the data of records "prompt answer"."""
    records = [dict(zip(("prompt", "completion"), text.split(), strict=True)) for text in texts]
    lines = (json.dumps(record | {"label": "b" not in record["completion"]}) for record in records)
    (folder / "answers.jsonl").write_text("\n".join(lines))
    (folder / "plain.jinja").write_text(PLAIN)
    return DataConfig.model_validate(
        {
            "kind": "unpaired", "path": str(folder / "answers.jsonl"), "tokenizer": "bytes", "seq_len": 7,
            "chat_template": str(folder / "plain.jinja"), **settings,
        }
    )  # fmt: skip


def documents(folder: Path, texts: Sequence[str], **settings: Any) -> list[tuple[str, str]]:
    """Return the documents of such records, and the sign of each token's loss weight."""
    data = data_of(folder, texts, **settings)
    corpus = open_corpus("answers", *tokens_of(data, folder), 257)
    ends = np.cumsum(corpus.document_lengths)[:-1]
    assert corpus.loss_weights is not None
    ids, weights = (np.split(values, ends) for values in (corpus.tokens, corpus.loss_weights))
    signs = ("".join("0+-"[int(np.sign(float(w)))] for w in of.tolist()) for of in weights)
    return [(bytes(of.tolist()).decode(), sign) for of, sign in zip(ids, signs, strict=True)]


def test_each_prompt_comes_with_an_answer_to_another_one(tmp_path: Path) -> None:
    """The nearest before it, or at the beginning the first after it. A token is a byte, and `.` ends answers."""
    assert documents(tmp_path, ["q a", "q b", "rr c", "rr bd", "s e", "q aaaaaaaaaa", "tttttttt a"]) == [
        ("qa.", "0++"), ("qc.", "0++"),
        ("qb.", "0--"), ("qc.", "0++"),
        ("rrc.", "00++"), ("rrb.", "00++"),
        ("rrbd.", "00---"), ("rrb.", "00++"),
        ("se.", "0++"), ("sbd.", "0+++"),
        ("qaaaaaaa", "0+++++++"), ("qe.", "0++"),
    ]  # fmt: skip
    dropped = documents(tmp_path, ["q a", "qqqqqq c", "q bbbbbbbb"], truncation="drop")
    assert dropped == [("qa.", "0++"), ("qc.", "0++"), ("qqqqqqc.", "000000++"), ("qqqqqqa.", "000000++")]


def test_only_kto_refuses_answers_to_one_prompt(tmp_path: Path) -> None:
    """They then come with themselves, whose loss weights are negative."""
    assert documents(tmp_path, ["q a", "q b"]) == [("qa.", "0++"), ("qa.", "0--"), ("qb.", "0--"), ("qb.", "0--")]
    data = data_of(tmp_path, ["q a", "q b"])
    tokens = tokens_of(data, tmp_path)
    meta = read_meta(tokens[0])
    assert meta and meta.report == (
        "2 records: 2 sequences, 6 tokens, 4 of them learned; 2 mismatched answers, not learned",
    )
    batch = open_stream(data, tokens, 257, 1).next_batch()
    assert batch.columns[LABELS].tolist() == [[1, 1, 0, -1, -1, 0, 0]]
    with pytest.raises(ConfigError, match=r"all answers of .*answers\.jsonl are to one prompt, and kto compares"):
        check_prompts(data, tokens, 257)
    data = data_of(tmp_path, ["q a", "r b"])
    check_prompts(data, tokens_of(data, tmp_path), 257)
