"""Preferences: every format as the same two conversations, what of them is kept in a row, and what is wrong named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_sources import open_windows
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch import BatchKind, assemble
from megatrain_ray.io.chat.conversation_formats import LAYOUTS
from megatrain_ray.io.chat.find_chats import Answers, find_chats
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.chat.preferences import PairLayout, read_margin, read_pair
from megatrain_ray.io.records.read_records import RecordError, read_records
from megatrain_ray.io.tokens.token_files import read_meta
from tests.io.chat.test_chat_records import said
from tests.support.texts import tokens_of

PLAIN = "{% for m in messages %}{{ m.content }}{{ '.' if m.role == 'assistant' }}{% endfor %}"  # as TRL writes texts
PROMPT = (("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "R"))
ASKED = said(*PROMPT)
HISTORY = {"instruction": "R", "input": "", "history": [["Q", "A"]], "system": "S"}
SHAREGPT = [{"from": role, "value": text} for role, text in zip(("human", "gpt", "human"), "QAR", strict=True)]
WHOLE = {"chosen": [*ASKED, *said(("assistant", "B"))], "rejected": [*ASKED, *said(("assistant", "C"))]}
SAME: dict[str, Any] = {
    "explicit": {"prompt": ASKED, "chosen": said(("assistant", "B")), "rejected": said(("assistant", "C"))},
    "explicit, one message": {"prompt": ASKED, "chosen": said(("assistant", "B"))[0], "rejected": "C"},
    "implicit": WHOLE,
    "implicit, beside a text and the chosen conversation": WHOLE | {"prompt": "R", "messages": WHOLE["chosen"]},
    "implicit, beside messages": WHOLE | {"messages": WHOLE["chosen"]},
    "implicit, beside the prompt": WHOLE | {"prompt": ASKED},
    "explicit, beside another key of turns": {
        "conversation": ASKED, "chosen": said(("assistant", "B"))[0], "rejected": said(("assistant", "C"))[0],
    },
    "ranking, alpaca": HISTORY | {"chosen": "B", "rejected": "C"},
    "ranking, sharegpt": {"conversations": SHAREGPT, "system": "S"}
    | {"chosen": {"from": "gpt", "value": "B"}, "rejected": {"from": "gpt", "value": "C"}},
}  # fmt: skip


def read(record: Any) -> tuple[Conversation, Conversation]:
    return read_pair(record, PairLayout(LAYOUTS["auto"]))


@pytest.mark.parametrize("name", SAME)
def test_the_same_pair_in_every_format(name: str) -> None:
    for conversation, answer in zip(read(SAME[name] | {"id": 7}), "BC", strict=True):
        assert [(m["role"], m["content"]) for m in conversation.messages] == [*PROMPT, ("assistant", answer)]
        assert conversation.answers == [(4, 1.0)]  # answers of the prompt are not learned


def test_beside_texts_the_prompt_may_be_a_question() -> None:
    chosen, _ = read({"system": "", "question": "Q", "chosen": "A", "rejected": "B"})
    assert [m["content"] for m in chosen.messages] == ["Q", "A"]


def test_texts_without_a_prompt_part_before_the_blank_where_they_differ() -> None:
    """As TRL's extract_prompt: the prompt ends before the blank."""
    chosen, rejected = read({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    assert [m["content"] for m in chosen.messages] == ["The sky is", " blue."]
    assert [m["content"] for m in rejected.messages] == ["The sky is", " green."]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": "Q", "chosen": "A"}, "no key 'rejected'"),
        ({"chosen": "A", "rejected": "A"}, "chosen and rejected: expected two answers that differ"),
        ({"chosen": "A", "rejected": ["B"]}, "expected two texts or two lists of turns"),
        ({"chosen": "AB", "rejected": "A"}, "no prompt: one of chosen and rejected begins with the other"),
        ({"chosen": "A", "rejected": "B"}, "no prompt: chosen and rejected begin differently"),
        (
            {"prompt": "Q", "chosen": said(("user", "A")), "rejected": "B"},
            "chosen: expected an answer of the assistant",
        ),
        (
            {"prompt": "Q", "chosen": "A", "rejected": [{"role": "assistant", "content": "B", "weight": 0.5}]},
            "rejected: weights other than 0 and 1",
        ),
        (
            {"prompt": "Q", "chosen": "A", "rejected": "B", "image": "x"},
            "image: read with data.images: true",
        ),
    ],
)
def test_what_is_wrong_is_named(record: Any, problem: str) -> None:
    with pytest.raises(RecordError, match=problem):
        read(record)


def test_a_margin_that_is_no_number_is_named() -> None:
    for margin in ("wide", True, float("nan"), 1e39):
        with pytest.raises(RecordError, match="margin: expected a number, got "):
            read_margin({"margin": margin})


def test_the_ranking_of_llama_factory(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"q": "Q", "good": "A", "bad": "B"}]))
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    entries = {"a": {"file_name": "a.json", "ranking": True, "columns": columns}, "b": {"file_name": "a.json"}}
    entries["c"] = {"file_name": "a.json", "columns": {"kto_tag": "good"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    info = str(tmp_path / "dataset_info.json")
    (source,) = find_chats(info, "a", answers="preferred")
    assert isinstance(source.layout, PairLayout)
    for _, record in read_records(source.file):
        pair = read_pair(record, source.layout)
        assert [conversation.messages[-1]["content"] for conversation in pair] == ["A", "B"]
    wrong: tuple[tuple[str, Answers, str], ...] = (
        ("a", "learned", "set data.kind: pairs"), ("b", "preferred", "ranking is not true"),
        ("b", "labelled", "columns: no kto_tag"), ("c", "learned", "kto_tag is there"),
    )  # fmt: skip
    for name, answers, problem in wrong:
        with pytest.raises(ConfigError, match=problem):
            find_chats(info, name, answers=answers)


def test_a_pair_shares_a_row_and_is_cut_or_left_out_if_it_is_too_long(tmp_path: Path) -> None:
    """Rows of twelve inputs. A template without marks: a token is a byte."""
    texts = "q ab c", "qqqqqqqq ab c", "q abcdefgh c", "q abcdefgh abcdefgi", "r s t", "u v v"
    records = [dict(zip(("prompt", "chosen", "rejected"), text.split(), strict=True)) for text in texts]
    margins = [{}, {}, {"margin": -0.5}, {"margin": None}, {"margin": 2}, {"margin": 3}]
    records = [record | margin for record, margin in zip(records, margins, strict=True)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "plain.jinja").write_text(PLAIN)
    settings = {
        "kind": "pairs", "path": str(tmp_path / "pairs.jsonl"), "tokenizer": "bytes", "seq_len": 12,
        "chat_template": str(tmp_path / "plain.jinja"),
    }  # fmt: skip
    data = DataConfig.model_validate(settings)
    (folder,) = tokens_of(data, tmp_path)
    meta = read_meta(folder)
    assert meta is not None
    assert (meta.num_records, meta.num_cut, meta.num_dropped, meta.longest) == (6, 2, 2, 22)
    (windows,) = open_windows(data, (folder,), 257, whole=False)
    rows = windows.rows(np.arange(windows.num_windows))
    kept = [bytes(ids[real].tolist()).decode() for ids, real in zip(rows.ids, rows.documents >= 0, strict=True)]
    # What is too long is cut to what the other leaves of twelve tokens, or to half of them.
    assert kept == ["qab.qc.", "qabcdefghqc.", "qabcdeqabcde", "rs.rt."]
    batch = assemble(rows, BatchKind(weighted=True, documents_per_record=2))
    assert batch.num_documents == 8
    assert batch.num_tokens == 7 + 12 + 12 + 6  # all are inputs, those at the end of a full row as well
    margins = batch.columns["margins"]
    assert batch.loss_weights is None
    assert margins[margins != 0].tolist() == [-0.5, 2.0]
    assert {batch.input_ids[margins == margin].item() for margin in (-0.5, 2)} == {ord("q"), ord("r")}
    assert batch.positions is not None
    halves = DataConfig.model_validate(settings | {"packing": False})
    (folder,) = tokens_of(halves, tmp_path)
    meta = read_meta(folder)
    assert meta is not None and (meta.num_cut, meta.num_dropped, meta.longest) == (2, 2, 23)
    (windows,) = open_windows(halves, (folder,), 257, whole=False)
    batch = assemble(windows.rows(np.arange(windows.num_windows)), BatchKind(documents_per_record=2, row_parts=2))
    assert batch.positions is None and batch.num_documents == 8 and batch.real is not None
    kept = [bytes(ids[real].tolist()).decode() for ids, real in zip(batch.input_ids, batch.real, strict=True)]
    assert kept == ["qab.", "qc.", "qabcde", "qc.", "qabcde", "qabcde", "rs.", "rt."]
    margins = batch.columns["margins"]
    assert margins[margins != 0].tolist() == [-0.5, 2.0]
    dropped = DataConfig.model_validate(settings | {"truncation": "drop"})
    (folder,) = tokens_of(dropped, tmp_path)
    meta = read_meta(folder)
    assert meta is not None and (meta.num_cut, meta.num_dropped) == (0, 4)
