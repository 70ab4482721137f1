"""Makes sequences from records that hold token ids already."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.chat.encode_chats import EncodedChat, EncodedRecord, Truncation, tallied
from megatrain_ray.io.records.choose_records import ALL_RECORDS, RecordChoice, chosen_records
from megatrain_ray.io.records.read_records import (
    BadRecords,
    RecordError,
    RecordTally,
    as_mapping,
    missing_key,
    numbers_under,
)
from megatrain_ray.io.records.record_location import RecordLocation
from megatrain_ray.io.tokens.token_files import IGNORED, WEIGHT_TYPE, LossWeights, TokenBlock
from megatrain_ray.io.tokens.tokenizer import Tokenizer

# Keys of a record that holds ids.
IDS, LABELS, ATTENDED, LOSS_MASK, WEIGHTS = "input_ids", "labels", "attention_mask", "loss_mask", "weights"
# Keys that say where the documents of a packed record begin: positions of ids, a number for each document (as
# attention_mask may have), lengths of documents, and where they begin, perhaps with the end of the last one.
POSITIONS, NUMBERS, LENGTHS = "position_ids", "seq_idx", "seq_lengths"
STARTS = ("seq_start_id", "cu_seqlens", "cu_seq_lens_q")
PACKED_KEYS = (POSITIONS, NUMBERS, LENGTHS, *STARTS)
OTHER_MASKS = ("assistant_masks", "completion_mask")  # refused: some trainers read them instead of labels


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
    columns: ClassVar[tuple[str, ...]] = ()

    def settings(self) -> dict[str, Any]:
        return {
            "kind": "tokens",
            "weights": True,  # are read; an earlier release did not
            "documents": True,  # of packed records are told apart; an earlier release joined them
            "truncation": self.truncation,
            "seq_len": self.seq_len,
            "bad_records": self.bad_records,
            **self.choice.settings(),
        }

    def blocks(self, tokenizer: Tokenizer | None, tally: RecordTally) -> Generator[TokenBlock]:
        yield from tallied(self._records(), tally)

    def _records(self) -> Iterator[tuple[RecordLocation, EncodedRecord]]:
        for location, record in chosen_records(self.files, self.choice):
            yield location, self._encoded(record)

    def _encoded(self, record: Any) -> EncodedRecord:
        try:
            chats = read_token_record(record)
        except RecordError as error:
            return EncodedRecord([], [], str(error))
        return EncodedRecord.of(chats, self.seq_len + 1, self.truncation)


def read_token_record(record: Any) -> list[EncodedChat]:
    """Return the ids of a record's documents and their loss weights; most records are one document.

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
    real = np.ones(ids.size, np.bool_) if attended is None else attended != 0
    weights, parts = _loss_weights(fields, ids)[real], np.cumsum(_begins(fields, ids, attended, real))[real]
    cuts = np.flatnonzero(np.diff(parts)) + 1
    return list(map(EncodedChat, np.split(ids[real].astype(np.uint32), cuts), np.split(weights, cuts)))


def _begins(
    fields: Mapping[str, Any], ids: NDArray[Any], attended: NDArray[Any] | None, real: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return which tokens begin a document other than the one before, as any key of a packed record says it.

    real: which tokens are no pads.

    Raises RecordError for positions that do not count from 0 in each document, and for lengths of other tokens.
    """
    begins = np.zeros(ids.size, np.bool_)
    if (positions := _column(fields, POSITIONS, ids)) is not None:
        begins |= positions == 0
        wrong = np.flatnonzero(real & ~begins & (np.diff(positions, prepend=-1) != 1))
        if wrong.size:
            raise RecordError(
                f"{POSITIONS}: token {wrong[0]} has position {positions[wrong[0]]}; expected one more than the token "
                "before it, or 0 where a document begins"
            )
    places = np.flatnonzero(real)
    for numbers in (attended, _column(fields, NUMBERS, ids)):
        if numbers is not None:
            begins[places[1:][np.diff(numbers[places]) != 0]] = True  # pads between two tokens part nothing
    if (lengths := _numbers(fields, LENGTHS)) is not None:
        begins[_starts(LENGTHS, np.cumsum(lengths), ids, ends_at=ids.size)] = True
    for key in STARTS:
        if (starts := _numbers(fields, key)) is not None:
            begins[_starts(key, starts, ids)] = True
    return begins


def _starts(key: str, places: NDArray[Any], ids: NDArray[Any], ends_at: int | None = None) -> NDArray[Any]:
    """Return those places that are no end of the record. Raises RecordError unless they ascend within it."""
    ascends = not (np.diff(places, prepend=0) < 0).any() and (places.size == 0 or places[-1] <= ids.size)
    if not ascends or (ends_at is not None and places[-1:].tolist() != [ends_at]):
        raise RecordError(
            f"{key}: expected documents of all {ids.size} {IDS}, got ends or starts {places.tolist()!r:.60}"
        )
    return places[places < ids.size]


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
    """Return integers, or FP32 numbers where `kinds` has f. See `numbers_under`."""
    values = numbers_under(record, key, "numbers" if "f" in kinds else "integers", kinds)
    return None if values is None else values.astype(np.float32 if "f" in kinds else np.int64)
