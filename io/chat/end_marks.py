"""Finds the tokens after which a model's answer is over, for those who generate with an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.chat_template import ChatTemplate, load_chat_template
from megatrain_ray.io.chat.template_ending import find_surroundings, user_mark
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.tokenizer import FolderTokenizer, Tokenizer, named_tokens

_ANSWER = "zqx"  # occurs in no template
_MESSAGES = ({"role": "user", "content": "What?"}, {"role": "assistant", "content": _ANSWER})


class EndMarks(NamedTuple):
    """Holds the ids at which generation stops, and those that may be among them.

    ends: the last mark that the chat template writes after an answer, then the tokenizer's eos token, as far as
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
    turn = last_mark(tokenizer, after)
    pad = tokenizer.id_of(names["pad_token"]) if "pad_token" in names else eos
    ends = tuple(dict.fromkeys(end for end in (turn, eos) if end is not None))
    return EndMarks(ends, pad, tokenizer.mark_ids, "" if turn is not None else after.strip())


def text_after_answer(template: ChatTemplate) -> str:
    """Return what ends an answer: what a template writes after it and is learned, or the mark that begins a question.

    Empty if the template refuses an answer.
    """
    whole = _answered(template)
    try:
        around = find_surroundings(template)
        whole = around.cut(around.ended(whole, _MESSAGES[-1]))
    except ConfigError:  # with {% generation %} tags such a template may do
        pass
    after = whole.rpartition(_ANSWER)[2]
    if not after.strip():
        return user_mark(template)
    tagged = _tagged_after_answer(template)  # may go on to what closes a conversation, or end before the template does
    return tagged if tagged and not tagged.startswith(after.strip()) else after


def _tagged_after_answer(template: ChatTemplate) -> str:
    """Return what stands after an answer within {% generation %} tags; empty if there is none."""
    if not template.marks_generation(()):
        return ""
    try:
        text, places = template.render_marked(_MESSAGES, ())
    except RecordError:
        return ""
    answered = text.rfind(_ANSWER) + len(_ANSWER)
    return "".join(text[max(start, answered) : end] for start, end in places).strip()


def unlearned_mark(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    """Return the id of the mark after an answer that {% generation %} tags leave out; None if they leave out none."""
    if not template.marks_generation(()) or _tagged_after_answer(template):
        return None
    return last_mark(tokenizer, text_after_answer(template))


def lacks_bos(tokenizer: Tokenizer, template: ChatTemplate) -> bool:
    """Return whether Transformers begins a text with a bos token that a chat in this template does not begin with."""
    text = _answered(template)
    return bool(text) and tokenizer.adds_bos and tokenizer.encode(text)[:1].tolist() != [tokenizer.bos]


def _answered(template: ChatTemplate) -> str:
    try:
        return template.render(_MESSAGES)
    except RecordError:
        return ""


def last_mark(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of the last mark in what ends an answer; None if all of it is ordinary text.

    Generation stops by itself at a mark, but not at ordinary text. Marks before the last one may occur within an
    answer: Kimi K3 closes its thought as it closes the answer.
    """
    return next((token for token in tokenizer.encode(text).tolist()[::-1] if token in tokenizer.mark_ids), None)
