"""Encodes files of chats, or of records that hold token ids already, as sequences of ids, each with loss weights."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.chat.chat_template import ChatTemplate, MarkedText, TurnMarker
from megatrain_ray.io.chat.conversation_formats import ChatLayout, Conversation, read_conversation
from megatrain_ray.io.chat.find_chats import ChatSource
from megatrain_ray.io.chat.process_map import map_in_order
from megatrain_ray.io.records.choose_records import ALL_RECORDS, RecordChoice, RecordChooser
from megatrain_ray.io.records.read_records import (
    BadRecords,
    RecordError,
    RecordLocation,
    RecordOutcome,
    RecordTally,
    as_mapping,
    check_unicode,
    missing_key,
    read_records,
)
from megatrain_ray.io.tokens.token_files import IGNORED, WEIGHT_TYPE, LossWeights, TokenArray, TokenBlock
from megatrain_ray.io.tokens.tokenizer import Tokenizer

Truncation = Literal["turn", "drop"]

# Keys of a record that holds ids.
IDS, LABELS, ATTENDED, LOSS_MASK, WEIGHTS = "input_ids", "labels", "attention_mask", "loss_mask", "weights"
OTHER_MASKS = ("assistant_masks", "completion_mask")  # refused: some trainers read them instead of labels


@dataclass(frozen=True)
class ChatRecipe:
    """Makes sequences from chats. Each is a document of at most `seq_len` + 1 tokens."""

    sources: tuple[ChatSource, ...]
    tokenizer: str
    template: ChatTemplate
    truncation: Truncation
    seq_len: int
    bad_records: BadRecords
    num_processes: int = 1  # processes that tokenise; the sequences do not depend on it
    choice: RecordChoice = ALL_RECORDS

    has_weights: ClassVar[bool] = True

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(source.file for source in self.sources)

    def settings(self) -> dict[str, Any]:
        return {
            "layouts": [_described(source.layout) for source in self.sources],
            "template": [self.template.source, self.template.tool_use, dict(self.template.variables)],
            "truncation": self.truncation,
            "seq_len": self.seq_len,
            "bad_records": self.bad_records,
            **({"datasets": [source.dataset for source in self.sources]} if self.choice.max_records else {}),
            **self.choice.settings(),
        }

    def blocks(self, tokenizer: Tokenizer | None, tally: RecordTally) -> Generator[TokenBlock]:
        """Yield every sequence with something to learn, in the order of the files.

        Raises ConfigError as `tallied` and for a file that cannot be read, MegatrainError if a process dies.
        """
        assert tokenizer is not None
        encoder = ChatEncoder(tokenizer, self.template)
        work = RecordEncoder(encoder, [source.layout for source in self.sources], self.seq_len + 1, self.truncation)
        with closing(map_in_order(work, self._numbered(), self.num_processes)) as records:
            yield from tallied(records, tally)

    def _numbered(self) -> Iterator[tuple[RecordLocation, tuple[int, Any]]]:
        """Yield the records that are used, each with the number of its source."""
        chooser, dataset = RecordChooser(self.choice), None
        for number, source in enumerate(self.sources):
            if source.dataset != dataset:
                chooser.restart()
            dataset = source.dataset
            for location, record in chooser.of(read_records(source.file)):
                yield location, (number, record)
        chooser.check()


def _described(layout: ChatLayout) -> list[Any]:
    """Return a layout as data for JSON. Sets are sorted, because their own order differs between processes."""
    fields = {key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(layout).items()}
    return [type(layout).__name__, fields]


class EncodedChat(NamedTuple):
    """Holds the ids of a chat, their loss weights, and for each answer the number of tokens up to its end.

    answer_ends: None for a record of ids, which does not tell its answers apart.
    """

    ids: TokenArray  # [num_tokens]
    loss_weights: LossWeights  # [num_tokens]
    answer_ends: NDArray[np.int64] | None = None  # [num_answers]


class ChatEncoder:
    """Encodes a conversation as ids and loss weights, which is the expensive part of reading chats. Holds no state."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._marker = TurnMarker(template)

    def encode(self, conversation: Conversation) -> list[EncodedChat]:
        """Return the sequences of a conversation: one, or several if the template rewrites earlier turns.

        Raises RecordError if the template refuses the conversation.
        """
        return [self._encode(marked) for marked in self._marker.mark(conversation)]

    def _encode(self, marked: MarkedText) -> EncodedChat:
        ids, starts, ends = self._tokenizer.encode_placed(check_unicode(marked.text, "the conversation"))
        loss_weights = np.zeros(ids.size, WEIGHT_TYPE)
        for start, end in marked.spans:
            learned = (starts < end) & (ends > start)
            for token in np.flatnonzero(learned & (starts < start)):
                # The prompt's last token reaches into the answer. It is supervised unless it takes only blanks of it.
                learned[token] = not marked.text[start : ends[token]].isspace()
            loss_weights[learned] = 1
        answer_ends = np.searchsorted(starts, [end for _, end in marked.spans])
        return EncodedChat(ids.astype(np.uint32), loss_weights, answer_ends)


class EncodedRecord(NamedTuple):
    """Holds the result of one record: the ids and loss weights of what is kept of it, and its outcomes for the tally.

    problem: what is wrong with the record; None: nothing.
    """

    kept: list[tuple[TokenArray, LossWeights]]
    outcomes: list[RecordOutcome]
    problem: str | None = None

    @staticmethod
    def of(
        chats: Sequence[EncodedChat], max_tokens: int, truncation: Truncation, outcomes: Sequence[RecordOutcome] = ()
    ) -> EncodedRecord:
        """Return what is kept of the sequences of a record, of at most `max_tokens` each, and add to its outcomes."""
        cuts = [_kept_length(chat, max_tokens, truncation) for chat in chats]
        kept = [(c.ids[:length], c.loss_weights[:length]) for c, (length, _) in zip(chats, cuts, strict=True) if length]
        return EncodedRecord(kept, [*outcomes, *(outcome for _, outcome in cuts if outcome)])


def _kept_length(chat: EncodedChat, max_tokens: int, truncation: Truncation) -> tuple[int, RecordOutcome | None]:
    """Return how many tokens are kept, up to the last answer that fits whole or in the first, and why not all are."""
    if not chat.loss_weights[1:].any():  # the first token is never a target
        return 0, RecordOutcome.NOTHING_LABELLED if chat.answer_ends is None else RecordOutcome.NOTHING
    if chat.ids.size <= max_tokens:
        return chat.ids.size, None
    if truncation == "drop" or not chat.loss_weights[1:max_tokens].any():
        return 0, RecordOutcome.TOO_LONG
    if chat.answer_ends is None:
        return max_tokens, RecordOutcome.CUT
    whole = chat.answer_ends[chat.answer_ends <= max_tokens]
    return (int(whole[-1]), RecordOutcome.CUT_AT_TURN) if whole.size else (max_tokens, RecordOutcome.CUT_INSIDE)


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
            return EncodedRecord([], [], str(error))
        outcomes = [] if chats else [RecordOutcome.NO_ANSWER]
        if chats and conversation.messages[-1]["role"] != "assistant":
            outcomes.append(RecordOutcome.TRAILING)
        if len(chats) > 1:
            outcomes.append(RecordOutcome.SPLIT)
        return EncodedRecord.of(chats, self.max_tokens, self.truncation, outcomes)


def tallied(records: Iterable[tuple[RecordLocation, EncodedRecord]], tally: RecordTally) -> Iterator[TokenBlock]:
    """Yield the sequences of the records and count what became of these.

    Raises ConfigError for a bad record unless the tally skips it, and at the end if there was nothing to learn.
    """
    for location, record in records:
        tally.num_records += 1
        if record.problem is not None:
            tally.bad(location, record.problem)
        for outcome in record.outcomes:
            tally.note(outcome, location)
        for ids, loss_weights in record.kept:
            tally.count_sequence(loss_weights)
            yield TokenBlock(ids, True, location, loss_weights)
    tally.check_learned()


@dataclass(frozen=True)
class PretokenizedRecipe:
    """Makes sequences from files of records with ids. Each is a document of at most `seq_len` + 1 tokens."""

    files: tuple[Path, ...]
    truncation: Truncation
    seq_len: int
    bad_records: BadRecords
    choice: RecordChoice = ALL_RECORDS
    tokenizer: ClassVar[None] = None
    has_weights: ClassVar[bool] = True

    def settings(self) -> dict[str, Any]:
        return {
            "kind": "tokens",
            "truncation": self.truncation,
            "seq_len": self.seq_len,
            "bad_records": self.bad_records,
            **self.choice.settings(),
        }

    def blocks(self, tokenizer: Tokenizer | None, tally: RecordTally) -> Generator[TokenBlock]:
        yield from tallied(self._records(), tally)

    def _records(self) -> Iterator[tuple[RecordLocation, EncodedRecord]]:
        chooser = RecordChooser(self.choice)
        for file in self.files:
            for location, record in chooser.of(read_records(file)):
                yield location, self._encoded(record)
        chooser.check()

    def _encoded(self, record: Any) -> EncodedRecord:
        try:
            chat = read_token_record(record)
        except RecordError as error:
            return EncodedRecord([], [], str(error))
        return EncodedRecord.of([chat], self.seq_len + 1, self.truncation)


def read_token_record(record: Any) -> EncodedChat:
    """Return the ids of a record and their loss weights.

    Tokens with a 0 in attention_mask are pads and left out. Raises RecordError.
    """
    fields = as_mapping(record)
    if other := [key for key in OTHER_MASKS if fields.get(key) is not None]:
        raise RecordError(f"{other[0]}: is not read; give {LABELS}, {IGNORED} for what is not learned, or {LOSS_MASK}")
    ids = _numbers(fields, IDS)
    if ids is None:
        raise missing_key(fields, IDS)
    if ids.size and not 0 <= ids.min() <= ids.max() < 1 << 32:
        raise RecordError(f"{IDS}: expected ids of 0 and more, got {ids.min()} to {ids.max()}")
    attended = _column(fields, ATTENDED, ids)
    real = slice(None) if attended is None else attended != 0
    return EncodedChat(ids[real].astype(np.uint32), _loss_weights(fields, ids)[real])


def _loss_weights(fields: Mapping[str, Any], ids: NDArray[Any]) -> LossWeights:
    """Return the weight of each token: 0 where its label is -100 or its mask 0, else its own, which is 1 if not given.

    Raises RecordError, also for a label that is neither -100 nor the id.
    """
    labels, mask = _column(fields, LABELS, ids), _column(fields, LOSS_MASK, ids, kinds="biu")
    learned = np.ones(ids.size, np.bool_) if labels is None else labels != IGNORED
    if labels is not None and (wrong := np.flatnonzero(learned & (labels != ids))).size:
        at = int(wrong[0])
        raise RecordError(
            f"{LABELS}: token {at} has the label {labels[at]} and the id {ids[at]}; expected the id itself (labels are "
            f"not shifted), or {IGNORED}"
        )
    if mask is not None:
        if not np.isin(mask, (0, 1)).all():
            raise RecordError(f"{LOSS_MASK}: expected 0 and 1, got {mask.min()} to {mask.max()}; others are {WEIGHTS}")
        learned &= mask == 1
    weights = _column(fields, WEIGHTS, ids, kinds="iuf")
    if weights is None:
        return learned.astype(WEIGHT_TYPE)
    if (wrong := np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))).size:
        raise RecordError(f"{WEIGHTS}: expected numbers of 0 and more, token {wrong[0]} has {weights[wrong[0]]}")
    return np.where(learned, weights, 0).astype(WEIGHT_TYPE)


def _column(record: Mapping[str, Any], key: str, ids: NDArray[Any], kinds: str = "iu") -> NDArray[Any] | None:
    values = _numbers(record, key, kinds)
    if values is not None and values.size != ids.size:
        raise RecordError(f"{key}: has {values.size} numbers, {IDS} {ids.size}; expected as many")
    return values


def _numbers(record: Mapping[str, Any], key: str, kinds: str = "iu") -> NDArray[Any] | None:
    """Return the numbers under a key, None if there are none. Raises RecordError if they are not of numpy's `kinds`."""
    value = record.get(key)
    if value is None:
        return None
    try:
        numbers = np.array(value)
    except ValueError:  # lists of several lengths
        numbers = np.array(None)
    if not isinstance(value, list) or numbers.ndim != 1 or (value and numbers.dtype.kind not in kinds):
        raise RecordError(f"{key}: expected a list of {'numbers' if 'f' in kinds else 'integers'}, got {value!r:.60}")
    return numbers.astype(np.float32 if "f" in kinds else np.int64)
