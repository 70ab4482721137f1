"""The tokens at which generation stops, for well-known families' templates and tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from megatrain_ray.io.chat.template_ending import find_end_marks
from tests.support.chat_fixtures import FAMILIES, Family, build


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_an_answer_ends_where_its_family_ends_it(tmp_path: Path, family: Family) -> None:
    ids = tokenizers.Tokenizer.from_file(str(build(tmp_path, family) / "tokenizer.json")).token_to_id
    marks = find_end_marks(tmp_path, chats=True)
    assert marks.ends == tuple(dict.fromkeys((ids(family.ending), ids(family.eos))))
    assert marks.pad == ids(family.eos)
    assert marks.marks >= {ids(mark) for mark in family.specials}
    assert find_end_marks(tmp_path, chats=False).ends == (ids(family.eos),)


def settings(folder: Path, **changes: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_pad_token_of_its_own_is_found(tmp_path: Path) -> None:
    build(tmp_path, FAMILIES["qwen2.5"])
    settings(tmp_path, pad_token="<|endoftext|>")
    marks = find_end_marks(tmp_path, chats=True)
    assert marks.pad in marks.marks - set(marks.ends)


def test_an_answer_may_end_with_text(tmp_path: Path) -> None:
    build(tmp_path, FAMILIES["qwen2.5"])
    settings(tmp_path, chat_template="{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    assert find_end_marks(tmp_path, chats=True) == find_end_marks(tmp_path, chats=False)


def test_the_next_turn_may_end_an_answer(tmp_path: Path) -> None:
    build(tmp_path, FAMILIES["qwen2.5"])
    settings(tmp_path, chat_template="{% for m in messages %}<|im_start|>{{ m.role + m.content }}{% endfor %}")
    begin = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|im_start|>")
    assert find_end_marks(tmp_path, chats=True).ends[0] == begin


def test_a_mark_within_answers_ends_none(tmp_path: Path) -> None:
    """Kimi K3 closes the thought, the answer and the message with the same mark, and ends the message with another."""
    build(tmp_path, FAMILIES["qwen2.5"])
    answer = "<|im_start|>think<|im_start|>{{ m.content }}<|im_start|>answer<|endoftext|>"
    source = "{% for m in messages %}<|im_start|>{{ m.role }}" + answer + "{% endfor %}"
    settings(tmp_path, chat_template=source + "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}")
    end = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|endoftext|>")
    assert find_end_marks(tmp_path, chats=True).ends[0] == end


@pytest.mark.parametrize(
    "closing",
    [
        "{{ '<|endoftext|>' if loop.last and not add_generation_prompt }}{% endgeneration %}",  # Phi-3's for training
        "{% endgeneration %}<|endoftext|>",
    ],
)
def test_an_answer_ends_within_its_tags_and_before_what_closes_the_conversation(tmp_path: Path, closing: str) -> None:
    build(tmp_path, FAMILIES["qwen2.5"])
    answer = "{% generation %}{{ m.content }}<|im_end|>" + closing
    turn = "{% if m.role == 'assistant' %}" + answer + "{% else %}{{ m.content }}<|im_end|>{% endif %}"
    source = "{% for m in messages %}<|im_start|>{{ m.role }}" + turn + "{% endfor %}"
    settings(tmp_path, chat_template=source + "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}")
    end = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|im_end|>")
    assert find_end_marks(tmp_path, chats=True).ends[0] == end


def test_a_template_that_refuses_an_answer_has_no_mark(tmp_path: Path) -> None:
    build(tmp_path, FAMILIES["qwen2.5"])
    settings(tmp_path, chat_template="{{ raise_exception('no') }}")
    assert find_end_marks(tmp_path, chats=True) == find_end_marks(tmp_path, chats=False)
