"""Finds the tokens after which a model's answer is over, for those who generate with an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from megatrain_ray.io.chat.chat_template import load_chat_template
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.tokenizer import FolderTokenizer, named_tokens

_ANSWER = "zqx"  # occurs in no template


class EndMarks(NamedTuple):
    """Holds ids of special tokens.

    end_of_turn: written by the chat template after an answer; None: an answer ends with ordinary text, at which
        generation cannot stop by itself.
    end_of_text: the tokenizer's eos token; None: it names none.
    pad: the tokenizer's pad token, else its eos token.
    """

    end_of_turn: int | None
    end_of_text: int | None
    pad: int | None

    @property
    def all_ends(self) -> tuple[int, ...]:
        """Return the ids at which generation stops, each once."""
        return tuple(dict.fromkeys(end for end in (self.end_of_turn, self.end_of_text) if end is not None))


def find_end_marks(folder: Path, *, chats: bool) -> EndMarks:
    """Return the end marks of a tokenizer's folder, with its chat template or the plain one.

    chats: whether the model learned chats; `end_of_turn` is None otherwise.

    Raises ConfigError for broken files.
    """
    tokenizer, names = FolderTokenizer(folder), named_tokens(folder)
    eos = tokenizer.end_of_document
    pad = tokenizer.id_of(names["pad_token"]) if "pad_token" in names else eos
    return EndMarks(_end_of_turn(folder, tokenizer) if chats else None, eos, pad)


def _end_of_turn(folder: Path, tokenizer: FolderTokenizer) -> int | None:
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = load_chat_template(str(folder)).render(messages)
    except RecordError:
        return None
    after = tokenizer.encode(text.rpartition(_ANSWER)[2]).tolist()
    return next((token for token in after if token in tokenizer.special_ids), None)
