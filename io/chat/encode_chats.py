"""Files of chats as sequences of token ids, each with a mask of the tokens that are learned."""

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
    """Ids, the mask, and the lengths after which an answer ends."""

    ids: TokenIds  # [num_tokens]
    supervised: Mask  # [num_tokens]
    answer_ends: NDArray[np.int64]  # [num_answers]


class ChatEncoder:
    """Conversation to ids and mask: the part that takes the time. Holds no state."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Raises ConfigError for a template that cannot be used."""
        self._tokenizer = tokenizer
        self._marker = TurnMarker(template)

    def encode(self, conversation: Conversation) -> list[EncodedChat]:
        """The sequences of a conversation: one, or one a turn where the template rewrites earlier turns.

        Ids are those of the whole text, tokenised once without further special tokens. Raises RecordError for what
        the template refuses.
        """
        return [self._encode(marked) for marked in self._marker.mark(conversation)]

    def _encode(self, marked: MarkedText) -> EncodedChat:
        _check_text(marked.text)
        ids, starts, ends = self._tokenizer.encode_placed(marked.text)
        supervised = np.zeros(ids.size, np.bool_)
        for start, end in marked.spans:
            learned = (starts < end) & (ends > start)
            for token in np.flatnonzero(learned & (starts < start)):
                # The prompt's last token reaches into the answer. It is learned unless all it takes are blanks.
                learned[token] = not marked.text[start : ends[token]].isspace()
            supervised |= learned
        answer_ends = np.searchsorted(starts, [end for _, end in marked.spans])
        return EncodedChat(ids.astype(np.uint32), supervised, answer_ends)


class EncodedRecord(NamedTuple):
    """What became of a record: ids and masks of what is kept of it, and what is to be told.

    `highest_id`: of all its ids, cut off or not. `problem`: what is wrong with it, if anything is.
    """

    kept: list[tuple[TokenIds, Mask]]
    fates: list[Fate]
    highest_id: int = -1
    problem: str | None = None


@dataclass(frozen=True)
class RecordEncoder:
    """Records, each with the number of its layout, to what becomes of them. May be copied to other processes."""

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
    """Every sequence of these files in their order, at most `max_tokens` long (seq_len + 1), with something to learn.

    The same from any number of processes. Raises ConfigError for a file that cannot be read, a bad record unless the
    tally skips it, an id outside of the model's vocabulary, and at the end where there was nothing to learn;
    MegatrainError where a process dies.
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
    """Every record of the sources with its place, and the number of its source."""
    for number, source in enumerate(sources):
        for place, record in read_records(source.file):
            yield place, (number, record)


def _length(chat: EncodedChat, max_tokens: int, truncation: Truncation) -> tuple[int, Fate | None]:
    """How much is kept, and why not all: up to the last answer that fits whole, else a part of the first."""
    if not chat.supervised[1:].any():  # the first token is nobody's target
        return 0, Fate.NOTHING
    if chat.ids.size <= max_tokens:
        return chat.ids.size, None
    if truncation == "drop" or not chat.supervised[1:max_tokens].any():
        return 0, Fate.TOO_LONG
    whole = chat.answer_ends[chat.answer_ends <= max_tokens]
    return (int(whole[-1]), Fate.CUT_AT_TURN) if whole.size else (max_tokens, Fate.CUT_INSIDE)


def _check_text(text: str) -> None:
    """JSON can hold one half of a pair of surrogates, which is no text: tokenizers refuse it in ways of their own."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordError(f"half a character: {text[error.start]!r} is a surrogate without its pair") from None
