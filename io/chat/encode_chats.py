"""Encodes files of chats as sequences of token ids, each with a loss mask."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.assistant_mask import MarkedText, TurnMarker
from megatrain_ray.io.chat.chat_template import ChatTemplate
from megatrain_ray.io.chat.conversation_formats import ChatLayout, Conversation, read_conversation
from megatrain_ray.io.chat.find_chats import ChatSource
from megatrain_ray.io.chat.process_map import map_in_order
from megatrain_ray.io.records.read_records import Place, RecordError, read_records
from megatrain_ray.io.records.record_tally import ChatTally, Fate
from megatrain_ray.io.tokens.highest_id import HighestId
from megatrain_ray.io.tokens.sequence_writer import TokenIds, TokenSequence
from megatrain_ray.io.tokens.token_block import Mask
from megatrain_ray.io.tokens.tokenizer import Tokenizer

Truncation = Literal["turn", "drop"]


class EncodedChat(NamedTuple):
    """Holds the ids of a chat, its loss mask, and for each answer the number of tokens up to its end."""

    ids: TokenIds  # [num_tokens]
    supervised: Mask  # [num_tokens]
    answer_ends: NDArray[np.int64]  # [num_answers]


class ChatEncoder:
    """Encodes a conversation as ids and mask, which is the expensive part of reading chats. Holds no state."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Prepare to encode with a tokenizer and a template. Raises ConfigError for a template that cannot be used."""
        self._tokenizer = tokenizer
        self._marker = TurnMarker(template)

    def encode(self, conversation: Conversation) -> list[EncodedChat]:
        """Return the sequences of a conversation: one, or several if the template rewrites earlier turns.

        The whole text is tokenised at once, without further special tokens. Raises RecordError if the template refuses
        the conversation.
        """
        return [self._encode(marked) for marked in self._marker.mark(conversation)]

    def _encode(self, marked: MarkedText) -> EncodedChat:
        _check_text(marked.text)
        ids, starts, ends = self._tokenizer.encode_placed(marked.text)
        supervised = np.zeros(ids.size, np.bool_)
        for start, end in marked.spans:
            learned = (starts < end) & (ends > start)
            for token in np.flatnonzero(learned & (starts < start)):
                # The prompt's last token reaches into the answer. It is supervised unless it takes only blanks of it.
                learned[token] = not marked.text[start : ends[token]].isspace()
            supervised |= learned
        answer_ends = np.searchsorted(starts, [end for _, end in marked.spans])
        return EncodedChat(ids.astype(np.uint32), supervised, answer_ends)


class EncodedRecord(NamedTuple):
    """Holds the result of one record: the ids and masks of what is kept of it, and its fates for the tally.

    highest_id: highest of all its ids, including those that are cut off.
    problem: what is wrong with the record; None: nothing.
    """

    kept: list[tuple[TokenIds, Mask]]
    fates: list[Fate]
    highest_id: int = -1
    problem: str | None = None


@dataclass(frozen=True)
class RecordEncoder:
    """Encodes records, each given with the number of its layout. Picklable, so that other processes can run it."""

    encoder: ChatEncoder
    layouts: Sequence[ChatLayout]
    max_tokens: int
    truncation: Truncation

    def __call__(self, numbered: tuple[int, object]) -> EncodedRecord:
        number, record = numbered
        try:
            conversation = read_conversation(record, self.layouts[number])
            chats = self.encoder.encode(conversation)
        except RecordError as error:
            return EncodedRecord([], [], problem=str(error))
        fates = [] if chats else [Fate.NO_ANSWER]
        if chats and conversation.messages[-1]["role"] != "assistant":
            fates.append(Fate.TRAILING)
        if len(chats) > 1:
            fates.append(Fate.SPLIT)
        cuts = [_length(chat, self.max_tokens, self.truncation) for chat in chats]
        kept = [(c.ids[:length], c.supervised[:length]) for c, (length, _) in zip(chats, cuts, strict=True) if length]
        highest_id = max((int(chat.ids.max(initial=0)) for chat in chats), default=-1)
        return EncodedRecord(kept, fates + [fate for _, fate in cuts if fate], highest_id)


def read_chats(
    sources: Sequence[ChatSource],
    encoder: ChatEncoder,
    tally: ChatTally,
    *,
    max_tokens: int,
    truncation: Truncation,
    vocab_size: int,
    num_processes: int = 1,
) -> Generator[TokenSequence]:
    """Yield every sequence with something to learn, in the order of the files.

    The sequences do not depend on the number of processes.

    max_tokens: length of a sequence at most, seq_len + 1.

    Raises ConfigError for a file that cannot be read, a bad record unless the tally skips it, an id outside the model's
    vocabulary, and at the end if there was nothing to learn. Raises MegatrainError if a process dies.
    """
    highest = HighestId(vocab_size)
    work = RecordEncoder(encoder, [source.layout for source in sources], max_tokens, truncation)
    with closing(map_in_order(work, _numbered(sources), num_processes)) as records:
        for place, record in records:
            tally.num_records += 1
            if record.problem is not None:
                tally.bad(place, record.problem)
            highest.check(record.highest_id, str(place))
            for fate in record.fates:
                tally.note(fate, place)
            for ids, supervised in record.kept:
                tally.learn(supervised)
                yield TokenSequence(ids, supervised, place)
    if not tally.num_sequences:
        raise ConfigError("\n".join(["data.path: nothing to learn", *tally.lines()]))


def _numbered(sources: Sequence[ChatSource]) -> Iterator[tuple[Place, tuple[int, object]]]:
    """Yield every record of the sources with its location and the number of its source."""
    for number, source in enumerate(sources):
        for place, record in read_records(source.file):
            yield place, (number, record)


def _length(chat: EncodedChat, max_tokens: int, truncation: Truncation) -> tuple[int, Fate | None]:
    """Return how many tokens of a chat are kept, and the reason if not all are.

    A chat that is too long is cut after the last answer that fits whole, else inside the first answer.
    """
    if not chat.supervised[1:].any():  # the first token is never a target
        return 0, Fate.NOTHING
    if chat.ids.size <= max_tokens:
        return chat.ids.size, None
    if truncation == "drop" or not chat.supervised[1:max_tokens].any():
        return 0, Fate.TOO_LONG
    whole = chat.answer_ends[chat.answer_ends <= max_tokens]
    return (int(whole[-1]), Fate.CUT_AT_TURN) if whole.size else (max_tokens, Fate.CUT_INSIDE)


def _check_text(text: str) -> None:
    """Raise RecordError for a lone surrogate.

    JSON can hold one half of a pair of surrogates, which is no text: each tokenizer fails on it in its own way.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordError(f"half a character: {text[error.start]!r} is a surrogate without its pair") from None
