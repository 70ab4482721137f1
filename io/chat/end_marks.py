"""Finds the tokens after which a model's answer is over, for those who generate with an exported model."""

from __future__ import annotations

from pathlib import Path

from megatrain_ray.io.chat.chat_template import load_chat_template
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.tokenizer import FolderTokenizer, named_tokens

_ANSWER = "zqx"  # occurs in no template


def end_of_turn(folder: Path) -> int | None:
    """Return the id of the special token that the folder's chat template writes after an answer.

    folder: a tokenizer's, with its chat template if there is one; the plain template is used otherwise.

    Returns None if an answer ends with ordinary text, at which generation cannot stop by itself. Raises ConfigError for
    broken files.
    """
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = load_chat_template(str(folder)).render(messages)
    except RecordError:
        return None
    tokenizer = FolderTokenizer(folder)
    after = tokenizer.encode(text.rpartition(_ANSWER)[2]).tolist()
    return next((token for token in after if token in tokenizer.special_ids), None)


def end_tokens(folder: Path, *, chats: bool) -> tuple[int, ...]:
    """Return the ids that end a text: that of the answer's end if the model learned chats, then the tokenizer's eos."""
    eos = FolderTokenizer(folder).end_of_document
    found = (end_of_turn(folder) if chats else None, eos)
    return tuple(dict.fromkeys(token for token in found if token is not None))


def pad_token(folder: Path) -> int | None:
    """Return the id of the tokenizer's pad token, else of its eos token; None if it has neither."""
    tokenizer = FolderTokenizer(folder)
    name = named_tokens(folder).get("pad_token")
    return tokenizer.end_of_document if name is None else tokenizer.id_of(name)
