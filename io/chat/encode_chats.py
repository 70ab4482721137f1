"""Encodes chats and preferences as sequences of ids, each with loss weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.chat.answer_texts import MarkedText, Notes
from megatrain_ray.io.chat.chat_template import ChatTemplate
from megatrain_ray.io.chat.conversation_formats import ChatLayout, Learn, read_conversation
from megatrain_ray.io.chat.mark_turns import TurnMarker
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.chat.preferences import PairLayout, UnpairedLayout, read_margin, read_pair
from megatrain_ray.io.images.image_parts import IMAGE, RecordImages
from megatrain_ray.io.images.image_processor import ImageProcessor
from megatrain_ray.io.images.replaced_images import ReplacedText, check_places
from megatrain_ray.io.records.read_records import DROPPED, RecordError, RecordOutcome, RecordTally, check_unicode
from megatrain_ray.io.records.record_location import RecordLocation
from megatrain_ray.io.tokens.byte_tokenizer import END_NAME, ByteTokenizer
from megatrain_ray.io.tokens.image_files import StoredImage
from megatrain_ray.io.tokens.token_files import WEIGHT_TYPE, Columns, LossWeights, TokenArray, TokenBlock
from megatrain_ray.io.tokens.tokenizer import Tokenizer

Truncation = Literal["turn", "drop"]


class EncodedChat(NamedTuple):
    """Holds the ids of a chat, their loss weights, and for each answer the number of tokens up to its end.

    answer_ends: None for a record of ids, which does not tell its answers apart.
    notes: as in MarkedText.
    columns, images: as of a TokenBlock.
    """

    ids: TokenArray  # [num_tokens]
    loss_weights: LossWeights  # [num_tokens]
    answer_ends: NDArray[np.int64] | None = None  # [num_answers]
    notes: Notes = ()
    columns: Columns | None = None  # [num_columns, num_tokens]
    images: tuple[StoredImage, ...] = ()

    @property
    def whole(self) -> KeptSequence:
        return KeptSequence(self.ids, self.loss_weights, self.columns, images=self.images)


class ChatEncoder:
    """Encodes a conversation as ids and loss weights, which is the expensive part of reading chats. Holds no state."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, learn_reasoning: bool = True,
        processor: ImageProcessor | None = None,
    ) -> None:  # fmt: skip
        """Create the encoder. `processor`: of images; None: conversations hold none."""
        self._tokenizer = with_ends_of(template, tokenizer)
        self._marker = TurnMarker(template, learn_reasoning=learn_reasoning)
        self._processor = processor

    def encode(self, conversation: Conversation, images: Sequence[StoredImage] = ()) -> list[EncodedChat]:
        """Return the sequences of a conversation: one, or several if the template rewrites earlier turns.

        images: of its turns, in order.

        Raises RecordError if the template refuses the conversation, or the processor an image.
        """
        texts = self._marker.mark(conversation)
        if self._processor is None:
            return [self._encode(marked) for marked in texts]
        if texts:
            last = max(i for i, _ in conversation.answers)
            num_asked = sum((m.get("content") or "").count(IMAGE) for m in conversation.messages[:last])
            check_places(texts[-1].text, num_asked, self._processor)
        return [self._with_images(marked, images, self._processor) for marked in texts]

    def _with_images(self, marked: MarkedText, images: Sequence[StoredImage], processor: ImageProcessor) -> EncodedChat:
        replaced = ReplacedText.of(marked.text, images, processor, self._tokenizer)
        spans = tuple(
            span._replace(start=replaced.moved(span.start), end=replaced.moved(span.end)) for span in marked.spans
        )
        ends = tuple(map(replaced.moved, marked.ends))
        chat = self._encode(MarkedText(replaced.text, spans, ends, marked.notes))
        return chat._replace(columns=replaced.column(chat.ids), images=tuple(images))

    def _encode(self, marked: MarkedText) -> EncodedChat:
        ids, starts, ends = self._tokenizer.encode_placed(check_unicode(marked.text, "the conversation"))
        loss_weights = np.zeros(ids.size, WEIGHT_TYPE)
        reach = np.maximum.accumulate(ends)
        for start, end, weight in marked.spans:
            near = slice(np.searchsorted(reach, start, "right"), np.searchsorted(starts, end))
            learned = ends[near] > start
            for token in np.flatnonzero(learned & (starts[near] < start)):
                # The prompt's last token reaches into the answer. It is supervised unless it takes only blanks of it.
                learned[token] = not marked.text[start : ends[near][token]].isspace()
            loss_weights[near][learned] = weight
        answer_ends = np.searchsorted(starts, marked.ends)
        return EncodedChat(ids.astype(np.uint32), loss_weights, answer_ends, marked.notes)


def with_ends_of(template: ChatTemplate, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer for chats in this template: `bytes` has a mark for the end if the template may write it."""
    if isinstance(tokenizer, ByteTokenizer):
        return ByteTokenizer(marked=template.variables.get("eos_token") == END_NAME)
    return tokenizer


class KeptSequence(NamedTuple):
    """Holds what is kept of a sequence.

    columns, images: as of a TokenBlock.
    is_mismatched: whether it is not learned, but compared with (preferences.with_mismatched).
    """

    ids: TokenArray  # [num_tokens]
    loss_weights: LossWeights  # [num_tokens]
    columns: Columns | None = None  # [num_columns, num_tokens]
    is_mismatched: bool = False
    images: tuple[StoredImage, ...] = ()

    def first(self, num_tokens: int) -> KeptSequence:
        columns = None if self.columns is None else self.columns[:, :num_tokens]
        return self._replace(ids=self.ids[:num_tokens], loss_weights=self.loss_weights[:num_tokens], columns=columns)

    def mismatched(self, ids: TokenArray, loss_weights: LossWeights) -> KeptSequence:
        """Return the mismatched sequence of these ids, which begins with the same prompt, and so with its images."""
        columns = None
        if self.columns is not None:
            num_shared = min(self.ids.size, ids.size)  # answers hold no images: their columns are 0
            columns = np.zeros((len(self.columns), ids.size), WEIGHT_TYPE)
            columns[:, :num_shared] = self.columns[:, :num_shared]
        return KeptSequence(ids, loss_weights, columns, is_mismatched=True, images=self.images)

    def divides_image(self, num_tokens: int) -> bool:
        """Return whether the first tokens end within an image."""
        if self.columns is None:
            return False
        before, after = self.columns[:, :num_tokens], self.columns[:, num_tokens:]
        return bool((np.intersect1d(before, after) != 0).any())


class EncodedRecord(NamedTuple):
    """Holds the result of one record: what is kept of it, and its outcomes for the tally.

    problem: what is wrong with the record; None: nothing.
    longest: tokens of the window that its longest sequence needs, before it was cut.
    unused_files: image files that the record names, if nothing is kept of it: path, and identity if it is there.
    """

    kept: list[KeptSequence]
    outcomes: list[RecordOutcome]
    problem: str | None = None
    longest: int = 0
    unused_files: Sequence[list[Any]] = ()

    @staticmethod
    def of(
        chats: Sequence[EncodedChat], max_tokens: int, truncation: Truncation, outcomes: Sequence[RecordOutcome] = ()
    ) -> EncodedRecord:
        """Return what is kept of the sequences of a record, of at most `max_tokens` each, and add to its outcomes."""
        cuts = [_kept_length(chat, max_tokens, truncation) for chat in chats]
        cut = zip(chats, cuts, strict=True)
        kept = [chat.whole.first(length) for chat, (length, _) in cut if length]
        longest = max((chat.ids.size for chat in chats), default=0)
        return EncodedRecord(kept, [*outcomes, *(outcome for _, outcome in cuts if outcome)], longest=longest)

    @staticmethod
    def of_pair(
        pair: Sequence[EncodedChat], seq_len: int, truncation: Truncation, outcomes: Sequence[RecordOutcome],
        *, halves: bool = False,
    ) -> EncodedRecord:  # fmt: skip
        """Return what is kept of a preference, of at most `seq_len` tokens together, and add to its outcomes.

        A longer one is cut at the end, each sequence to what the other one leaves, or to half. It is left out if then
        nothing is left to learn of one of them, or one ends within an image.

        halves: each sequence is cut to half of seq_len.
        """
        lengths, half = [chat.ids.size for chat in pair], seq_len // 2
        limits = [half if halves else max(half, seq_len - other) for other in lengths[::-1]]
        cuts = [min(length, limit) for length, limit in zip(lengths, limits, strict=True)]
        longest = 2 * max(lengths) if halves else sum(lengths)
        is_cut = cuts != lengths
        lacks = not all(chat.loss_weights[1:].any() for chat in pair)
        loses = any(
            not chat.loss_weights[1:length].any() or chat.whole.divides_image(length)
            for chat, length in zip(pair, cuts, strict=True)
        )
        found = [*outcomes]
        if np.array_equal(pair[0].ids, pair[1].ids):
            found.append(RecordOutcome.ALIKE)
        elif lacks or is_cut:
            dropped = RecordOutcome.NOTHING_LABELLED if lacks else RecordOutcome.TOO_LONG
            found.append(dropped if lacks or loses or truncation == "drop" else RecordOutcome.CUT)
        kept = [chat.whole.first(length) for chat, length in zip(pair, cuts, strict=True)]
        return EncodedRecord([] if set(found) & set(DROPPED) else kept, found, longest=longest + 1)


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
    layouts: Sequence[ChatLayout | PairLayout | UnpairedLayout]
    seq_len: int
    truncation: Truncation
    learn: Learn = "all"
    halves: bool = False
    # Where paths of images start and the key that lists them, by layout, as for RecordImages; None: there are no images
    images: Sequence[tuple[Path, str | None]] | None = None

    def __call__(self, numbered: tuple[int, object]) -> EncodedRecord:
        number, record = numbered
        images = None
        try:
            if self.images is not None:
                images = RecordImages(record, *self.images[number])
                record = images.fields
            found = self._encoded(record, self.layouts[number], images)
        except RecordError as error:
            found = EncodedRecord([], [], str(error))
        return found if images is None or found.kept else found._replace(unused_files=images.named_files())

    def _encoded(
        self, record: object, layout: ChatLayout | PairLayout | UnpairedLayout, images: RecordImages | None
    ) -> EncodedRecord:
        if isinstance(layout, PairLayout):
            return self._pair(record, layout, images)
        is_good = True
        if isinstance(layout, UnpairedLayout):
            conversation, is_good = layout.read(record)
            chats = self._only(self._chats(conversation, images), "the answer")
        else:
            conversation = read_conversation(record, layout)
            if self.learn == "last":
                conversation = conversation.with_last_only()
            chats = self._chats(conversation, images)
        outcomes = []
        if not chats:
            outcomes = [RecordOutcome.NOTHING_LABELLED if conversation.assistant_turns else RecordOutcome.NO_ANSWER]
        outcomes += dict.fromkeys(note for chat in chats for note in chat.notes)
        if chats and conversation.messages[-1]["role"] != "assistant":
            outcomes.append(RecordOutcome.TRAILING)
        if len(chats) > 1:
            outcomes.append(RecordOutcome.SPLIT)
        if not is_good:
            chats = [chat._replace(loss_weights=-chat.loss_weights) for chat in chats]
        return EncodedRecord.of(chats, self.seq_len + 1, self.truncation, outcomes)

    def _pair(self, record: object, layout: PairLayout, images: RecordImages | None) -> EncodedRecord:
        pair: list[EncodedChat] = []
        for key, conversation in zip((layout.chosen, layout.rejected), read_pair(record, layout), strict=True):
            pair += self._only(self._chats(conversation, images), key)
        for chat, margin in zip(pair, (read_margin(record), 0.0), strict=True):
            chat.loss_weights[:1] = margin
        outcomes = [*dict.fromkeys(note for chat in pair for note in chat.notes)]
        return EncodedRecord.of_pair(pair, self.seq_len, self.truncation, outcomes, halves=self.halves)

    def _chats(self, conversation: Conversation, images: RecordImages | None) -> list[EncodedChat]:
        if images is None:
            return self.encoder.encode(conversation)
        messages, found = images.take(conversation.messages, conversation.tools)
        return self.encoder.encode(_checked(replace(conversation, messages=messages)), found)

    @staticmethod
    def _only(chats: list[EncodedChat], what: str) -> list[EncodedChat]:
        """Return the sequences of a conversation, of which there is one or none. Raises RecordError for more."""
        if len(chats) > 1:
            raise RecordError(f"{what}: the chat template writes its answers as {len(chats)} sequences; keep one")
        return chats


def _checked(conversation: Conversation) -> Conversation:
    """Return the conversation. Raises RecordError if an answer holds an image."""
    for index in conversation.assistant_turns:
        if IMAGE in (conversation.messages[index].get("content") or ""):
            raise RecordError(f"turn {index + 1} (assistant): an answer holds an image, which no model here writes")
    return conversation


def tallied(records: Iterable[tuple[RecordLocation, EncodedRecord]], tally: RecordTally) -> Iterator[TokenBlock]:
    """Yield the sequences of the records and count what became of these.

    Raises ConfigError for a bad record unless the tally skips it, and at the end if there was nothing to learn.
    """
    for location, record in records:
        tally.num_records += 1
        tally.longest = max(tally.longest, record.longest)
        tally.unused_files += record.unused_files
        if record.problem is not None:
            tally.bad(location, record.problem)
        for outcome in record.outcomes:
            tally.note(outcome, location)
        for kept in record.kept:
            tally.count_sequence(kept.loss_weights, is_mismatched=kept.is_mismatched)
            yield TokenBlock(kept.ids, True, location, kept.loss_weights, kept.columns, kept.images)
    tally.check_learned()
