"""Reads records that hold token ids already, made by a tokenizer elsewhere: `input_ids`, perhaps with `labels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.encode_chats import Truncation
from megatrain_ray.io.records.read_records import RecordError, read_records
from megatrain_ray.io.records.record_tally import BadRecords, ChatTally, Fate
from megatrain_ray.io.tokens.sequence_writer import SequenceFiles, TokenIds, TokenSequence
from megatrain_ray.io.tokens.token_block import Mask
from megatrain_ray.io.tokens.token_cache import TokenMeta, provenance_of

IDS, LABELS, ATTENDED = "input_ids", "labels", "attention_mask"
OTHER_MASKS = ("assistant_masks", "completion_mask", "loss_mask")  # refused: some trainers read them instead of labels
NOT_LEARNED = -100
ITEMSIZE = 4  # bytes of an id on disk: the tokenizer's vocabulary is not known, so every id must fit


@dataclass(frozen=True)
class TokenRecordsRecipe:
    """Makes sequences from files of records with ids. Each is a document of at most `seq_len` + 1 tokens."""

    files: tuple[Path, ...]
    truncation: Truncation
    seq_len: int
    bad_records: BadRecords

    def provenance(self) -> dict[str, Any]:
        """Return everything that decides the tokens, as data for JSON. Raises ConfigError if a file cannot be read."""
        settings = {"truncation": self.truncation, "seq_len": self.seq_len, "bad_records": self.bad_records}
        return {**provenance_of(self.files, None), "kind": "tokens", **settings}

    def write(self, folder: Path, vocab_size: int, advance: Callable[[int, int], None]) -> TokenMeta:
        """Write the token files into `folder`. Raises ConfigError naming file and record, and OSError."""
        tally = ChatTally(self.bad_records)
        files = SequenceFiles(self.files, vocab_size, advance)
        return files.write(folder, self._read(tally), tally, itemsize=ITEMSIZE, end=None)

    def _read(self, tally: ChatTally) -> Iterator[TokenSequence]:
        for place, record in (found for file in self.files for found in read_records(file)):
            tally.num_records += 1
            try:
                ids, supervised = read_token_record(record)
            except RecordError as error:
                tally.bad(place, str(error))
                continue
            length, fate = self._length(supervised)
            if fate:
                tally.note(fate, place)
            if length:
                tally.learn(supervised[:length])
                yield TokenSequence(ids[:length], supervised[:length], place)
        if not tally.num_sequences:
            raise ConfigError("\n".join(["data.path: nothing to learn", *tally.lines()]))

    def _length(self, supervised: Mask) -> tuple[int, Fate | None]:
        """Return how many tokens are kept, and the reason if not all are. The first token is never a target."""
        width = self.seq_len + 1
        if not supervised[1:].any():
            return 0, Fate.NOTHING_LABELLED
        if supervised.size <= width:
            return supervised.size, None
        if self.truncation == "drop" or not supervised[1:width].any():
            return 0, Fate.TOO_LONG
        return width, Fate.CUT


def read_token_record(record: Any) -> tuple[TokenIds, Mask]:
    """Return the ids of a record and its loss mask.

    Without labels all ids are supervised, else those whose label is the id itself and not -100. Tokens with a 0 in
    attention_mask are pads and left out. Raises RecordError.
    """
    if isinstance(record, RecordError):
        raise record
    if not isinstance(record, Mapping):
        raise RecordError(f"expected a mapping, got {record!r:.60}")
    if other := [key for key in OTHER_MASKS if record.get(key) is not None]:
        raise RecordError(f"{other[0]}: is not read; give labels, {NOT_LEARNED} for what is not learned")
    ids = _numbers(record, IDS)
    if ids is None:
        raise RecordError(f"{IDS}: missing; its keys: {', '.join(map(str, record)) or 'none'}")
    if ids.size and not 0 <= ids.min() <= ids.max() < 1 << 32:
        raise RecordError(f"{IDS}: expected ids of 0 and more, got {ids.min()} to {ids.max()}")
    labels = _column(record, LABELS, ids)
    supervised = np.ones(ids.size, np.bool_) if labels is None else labels != NOT_LEARNED
    if labels is not None and (wrong := np.flatnonzero(supervised & (labels != ids))).size:
        at = int(wrong[0])
        raise RecordError(
            f"{LABELS}: token {at} has the label {labels[at]} and the id {ids[at]}; expected the id itself (labels are "
            f"not shifted), or {NOT_LEARNED}"
        )
    attended = _column(record, ATTENDED, ids)
    real = slice(None) if attended is None else attended != 0
    return ids[real].astype(np.uint32), supervised[real]


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
