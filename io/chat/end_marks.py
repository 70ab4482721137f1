"""Finds the tokens after which a model's answer is over, for those who generate with an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from megatrain_ray.io.chat.chat_template import ChatTemplate, load_chat_template
from megatrain_ray.io.chat.template_ending import user_mark
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.tokenizer import FolderTokenizer, Tokenizer, named_tokens

_ANSWER = "zqx"  # occurs in no template
_MESSAGES = ({"role": "user", "content": "What?"}, {"role": "assistant", "content": _ANSWER})


class EndMarks(NamedTuple):
    """Holds the ids at which generation stops, and those that may be among them.

    ends: the mark that the chat template writes after an answer, then the tokenizer's eos token, as far as
        they exist, each once.
    pad: the tokenizer's pad token, else its eos token; None: it names neither.
    marks: all tokens that are no pieces of text.
    text: what the template writes after an answer, if it has no mark for it; empty otherwise.
    """

    ends: tuple[int, ...]
    pad: int | None
    marks: frozenset[int]
    text: str = ""


def find_end_marks(folder: Path, *, chats: bool) -> EndMarks:
    """Return the end marks of a tokenizer's folder.

    chats: whether the model learned chats, in the folder's template or the plain one.

    Raises ConfigError for broken files.
    """
    tokenizer, names = FolderTokenizer(folder), named_tokens(folder)
    eos = tokenizer.end_of_document
    after = text_after_answer(load_chat_template(str(folder))) if chats else ""
    turn = first_mark(tokenizer, after)
    pad = tokenizer.id_of(names["pad_token"]) if "pad_token" in names else eos
    ends = tuple(dict.fromkeys(end for end in (turn, eos) if end is not None))
    return EndMarks(ends, pad, tokenizer.mark_ids, "" if turn is not None else after.strip())


def text_after_answer(template: ChatTemplate) -> str:
    """Return what a template writes after an answer, or what ends one if it writes nothing; empty if it refuses one."""
    after = _answered(template).rpartition(_ANSWER)[2]
    return after if after.strip() else user_mark(template)


def unlearned_mark(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    """Return the id of the mark after an answer that {% generation %} tags leave out; None if they leave out none."""
    if not template.marks_generation(()):
        return None
    try:
        text, places = template.render_marked(_MESSAGES, ())
    except RecordError:
        return None
    answered = text.rfind(_ANSWER) + len(_ANSWER)
    learned = "".join(text[max(start, answered) : end] for start, end in places)
    mark = first_mark(tokenizer, text[answered:])
    return None if mark in tokenizer.encode(learned).tolist() else mark


def lacks_bos(tokenizer: Tokenizer, template: ChatTemplate) -> bool:
    """Return whether Transformers begins a text with a bos token that a chat in this template does not begin with."""
    text = _answered(template)
    return bool(text) and tokenizer.adds_bos and tokenizer.encode(text)[:1].tolist() != [tokenizer.bos]


def _answered(template: ChatTemplate) -> str:
    try:
        return template.render(_MESSAGES)
    except RecordError:
        return ""


def first_mark(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of the first mark in a text; None if all of it is ordinary text.

    Generation stops by itself at a mark, but not at ordinary text.
    """
    return next((token for token in tokenizer.encode(text).tolist() if token in tokenizer.mark_ids), None)
