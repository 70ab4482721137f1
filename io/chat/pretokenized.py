"""Reads records that hold token ids already, made by a tokenizer elsewhere: `input_ids`, perhaps with `labels`."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.chat.encode_chats import EncodedChat, EncodedRecord, Truncation, tallied
from megatrain_ray.io.records.read_records import RecordError, as_mapping, missing_key, read_records
from megatrain_ray.io.records.record_tally import BadRecords, RecordTally
from megatrain_ray.io.tokens.token_files import IGNORED, TokenBlock
from megatrain_ray.io.tokens.tokenizer import Tokenizer

IDS, LABELS, ATTENDED = "input_ids", "labels", "attention_mask"
OTHER_MASKS = ("assistant_masks", "completion_mask", "loss_mask")  # refused: some trainers read them instead of labels


@dataclass(frozen=True)
class PretokenizedRecipe:
    """Makes sequences from files of records with ids. Each is a document of at most `seq_len` + 1 tokens."""

    files: tuple[Path, ...]
    truncation: Truncation
    seq_len: int
    bad_records: BadRecords
    tokenizer: ClassVar[None] = None
    is_masked: ClassVar[bool] = True

    def settings(self) -> dict[str, Any]:
        return {
            "kind": "tokens",
            "truncation": self.truncation,
            "seq_len": self.seq_len,
            "bad_records": self.bad_records,
        }

    def blocks(self, tokenizer: Tokenizer | None, tally: RecordTally) -> Generator[TokenBlock]:
        records = (found for file in self.files for found in read_records(file))
        yield from tallied(((location, self._encoded(record)) for location, record in records), tally)

    def _encoded(self, record: Any) -> EncodedRecord:
        try:
            chat = read_token_record(record)
        except RecordError as error:
            return EncodedRecord([], [], str(error))
        return EncodedRecord.of([chat], self.seq_len + 1, self.truncation)


def read_token_record(record: Any) -> EncodedChat:
    """Return the ids of a record and its loss mask.

    Without labels all ids are supervised, else those whose label is the id itself and not -100. Tokens with a 0 in
    attention_mask are pads and left out. Raises RecordError.
    """
    fields = as_mapping(record)
    if other := [key for key in OTHER_MASKS if fields.get(key) is not None]:
        raise RecordError(f"{other[0]}: is not read; give labels, {IGNORED} for what is not learned")
    ids = _numbers(fields, IDS)
    if ids is None:
        raise missing_key(fields, IDS)
    if ids.size and not 0 <= ids.min() <= ids.max() < 1 << 32:
        raise RecordError(f"{IDS}: expected ids of 0 and more, got {ids.min()} to {ids.max()}")
    labels = _column(fields, LABELS, ids)
    supervised = np.ones(ids.size, np.bool_) if labels is None else labels != IGNORED
    if labels is not None and (wrong := np.flatnonzero(supervised & (labels != ids))).size:
        at = int(wrong[0])
        raise RecordError(
            f"{LABELS}: token {at} has the label {labels[at]} and the id {ids[at]}; expected the id itself (labels are "
            f"not shifted), or {IGNORED}"
        )
    attended = _column(fields, ATTENDED, ids)
    real = slice(None) if attended is None else attended != 0
    return EncodedChat(ids[real].astype(np.uint32), supervised[real])


def _column(record: Mapping[str, Any], key: str, ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
    values = _numbers(record, key)
    if values is not None and values.size != ids.size:
        raise RecordError(f"{key}: has {values.size} numbers, {IDS} {ids.size}; expected as many")
    return values


def _numbers(record: Mapping[str, Any], key: str) -> NDArray[np.int64] | None:
    value = record.get(key)
    if value is None:
        return None
    try:
        numbers = np.array(value)
    except ValueError:  # lists of several lengths
        numbers = np.array(None)
    if not isinstance(value, list) or numbers.ndim != 1 or (value and numbers.dtype.kind not in "iu"):
        raise RecordError(f"{key}: expected a list of integers, got {value!r:.60}")
    return numbers.astype(np.int64)
