"""Finds the tokens after which a model's answer is over, for those who generate with an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from megatrain_ray.io.chat.chat_template import ChatTemplate, load_chat_template
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.tokenizer import FolderTokenizer, named_tokens

_ANSWER = "zqx"  # occurs in no template


class EndMarks(NamedTuple):
    """Holds the ids at which generation stops, and those that may be among them.

    ends: the mark that the chat template writes after an answer, then the tokenizer's eos token, as far as
        they exist, each once.
    pad: the tokenizer's pad token, else its eos token; None: it names neither.
    marks: all tokens that are no pieces of text.
    """

    ends: tuple[int, ...]
    pad: int | None
    marks: frozenset[int]


def find_end_marks(folder: Path, *, chats: bool) -> EndMarks:
    """Return the end marks of a tokenizer's folder.

    chats: whether the model learned chats, in the folder's template or the plain one.

    Raises ConfigError for broken files.
    """
    tokenizer, names = FolderTokenizer(folder), named_tokens(folder)
    eos = tokenizer.end_of_document
    turn = end_of_turn(tokenizer, load_chat_template(str(folder))) if chats else None
    pad = tokenizer.id_of(names["pad_token"]) if "pad_token" in names else eos
    ends = tuple(dict.fromkeys(end for end in (turn, eos) if end is not None))
    return EndMarks(ends, pad, tokenizer.mark_ids)


def end_of_turn(tokenizer: FolderTokenizer, template: ChatTemplate) -> int | None:
    """Return the id of the mark that a template writes after an answer.

    None: an answer ends with ordinary text, at which generation cannot stop by itself.
    """
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = template.render(messages)
    except RecordError:
        return None
    after = tokenizer.encode(text.rpartition(_ANSWER)[2]).tolist()
    return next((token for token in after if token in tokenizer.mark_ids), None)
