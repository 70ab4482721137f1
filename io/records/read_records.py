"""Reads the records of a file (JSON or a table) in order, and counts what became of records."""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError, NothingToLearnError
from megatrain_ray.io.records.file_formats import open_bytes, suffix_of
from megatrain_ray.io.records.read_tables import DELIMITERS, TABLES, read_rows
from megatrain_ray.io.records.record_location import RecordLocation
from megatrain_ray.units import format_quantity

BadRecords = Literal["error", "skip"]
REMEMBERED = 5  # locations kept of each outcome
SHOWN_KEYS = 8  # of a record
NUM_SHOWN = 3  # of these, locations that a line of the report names
BOM = b"\xef\xbb\xbf"


class RecordError(ValueError):
    """Says what is wrong with one record. Whoever reports it adds the location."""


def read_records(file: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[RecordLocation, Any]]:
    """Yield every record with its location, in the order of the file. Blank lines are skipped.

    A record that cannot be decoded comes as the RecordError that says why, and reading continues after it.

    columns: of a Parquet or Arrow file, the columns to read; None: all.

    Raises ConfigError, naming file and location, for a file that cannot be read, is cut off or is damaged.
    """
    suffix = suffix_of(file)
    records = _rows(file, columns) if suffix in TABLES else _json(file)
    location = None
    try:
        for location, record in records:
            yield location, record
    except (OSError, pyarrow.ArrowException, csv.Error) as error:
        raise unreadable(file, error, f" after {location.unit} {location.number}" if location else "") from None


def unreadable(file: Path, error: Exception, where: str = "") -> ConfigError:
    """Return the error that says why a file cannot be read, and how far it could be (` after line 3`)."""
    if isinstance(error, OSError) and error.errno is not None:
        return ConfigError(f"data.path: cannot read {file}: {error.strerror}")
    what = str(error).partition("\n")[0].rstrip(".")  # Arrow reports damage with an OSError without a number
    return ConfigError(
        f"data.path: cannot read {file}{where}: {what}; it may be cut short or damaged: copy the file again"
    )


def as_written(location: RecordLocation, record: Any) -> Any:
    """Return a record as it was before a table stored it, if it is of one. `location`: of the record."""
    return without_nulls(record) if location.unit == "row" else record


def without_nulls(record: Any) -> Any:
    """Return a record without keys that are null inside its values.

    Arrow gives all mappings of a column the same keys, those of other records with null. So does the datasets library.
    """
    if not isinstance(record, dict):
        return record
    return {key: _without_null_keys(value) for key, value in record.items()}


def _without_null_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null_keys(part) for key, part in value.items() if part is not None}
    return [_without_null_keys(part) for part in value] if isinstance(value, list) else value


def as_mapping(record: Any) -> Mapping[str, Any]:
    """Return a record of `read_records`. Raises RecordError if it could not be decoded or is no mapping."""
    if isinstance(record, RecordError):
        raise record
    if not isinstance(record, dict):
        raise RecordError(f"expected a mapping, got {record!r:.60}")
    return record


def numbers_under(record: Mapping[str, Any], key: str, expected: str, kinds: str) -> NDArray[Any] | None:
    """Return the list of numbers under a key, None if it has none.

    kinds: of numpy. Raises RecordError, naming what was expected, if the numbers are of another kind.
    """
    value = record.get(key)
    if value is None:
        return None
    try:
        numbers = np.array(value)
    except ValueError:  # lists of several lengths
        numbers = np.array(None)
    if not isinstance(value, list) or numbers.ndim != 1 or (value and numbers.dtype.kind not in kinds):
        raise RecordError(f"{key}: expected a list of {expected}, got {value!r:.60}")
    return numbers


def missing_key(record: Mapping[str, Any], key: str, setting: str = "") -> RecordError:
    """Return the error that a record lacks a key, which `setting` names: ` (data.text_field)`."""
    return RecordError(f"no key {key!r}{setting}; its keys are {keys_of(record)}")


def keys_of(record: Mapping[str, Any]) -> str:
    """Return the first keys of a record, for a message. Those whose value is null are marked."""
    first = [f"{key!r}: null" if value is None else repr(key) for key, value in islice(record.items(), SHOWN_KEYS)]
    return ", ".join([*first, *["…"] * (len(record) > SHOWN_KEYS)]) or "none"


def check_unicode(text: str, what: str) -> str:
    """Return the text. Raises RecordError, naming `what`, for a lone surrogate.

    JSON can hold one half of a pair, which is no text: each tokenizer fails on it in its own way.
    """
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            surrogate = f"\\u{ord(text[error.start]):04x}"
            raise RecordError(f"{what} holds half a character ({surrogate}, a surrogate without its pair)") from None
    return text


def _json(file: Path) -> Iterator[tuple[RecordLocation, Any]]:
    """Yield the records of a list or of lines: many tools write lines as .json, and some a list as .jsonl."""
    with open_bytes(file) as (raw, stream):
        if stream.peek(1).removeprefix(BOM).lstrip().startswith(b"["):
            yield from _listed(file, stream.read().removeprefix(BOM))
        else:
            yield from _decoded_lines(file, stream, raw)


def _listed(file: Path, content: bytes) -> Iterator[tuple[RecordLocation, Any]]:
    records, size = _decoded(content), file.stat().st_size
    if isinstance(records, RecordError):
        raise ConfigError(f"data.path: {file} is {records}; expected a list of records")
    for number, record in enumerate(records, 1):
        yield RecordLocation(file, "record", number, size * number // len(records)), record


def _decoded_lines(file: Path, lines: Iterable[bytes], raw: Any) -> Iterator[tuple[RecordLocation, Any]]:
    for number, line in enumerate(lines, 1):
        text = (line.removeprefix(BOM) if number == 1 else line).rstrip()
        if text:
            several = text == b"{"
            record = RecordError("expected a whole record on a line, got '{' alone") if several else _decoded(text)
            yield RecordLocation(file, "line", number, raw.tell()), record


def _decoded(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        return RecordError(f"not valid JSON: {error.msg.removesuffix(' at')} at {where}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; too deeply nested brackets
        return RecordError(f"not valid JSON: {error}")


def _not_utf8(error: UnicodeDecodeError) -> RecordError:
    return RecordError(f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}")


def _rows(file: Path, columns: Sequence[str] | None) -> Iterator[tuple[RecordLocation, Any]]:
    unit = "line" if suffix_of(file) in DELIMITERS else "row"
    for number, read_bytes, value in read_rows(file, columns):
        problem = _not_utf8(value) if isinstance(value, UnicodeDecodeError) else value
        record = RecordError(str(problem)) if isinstance(problem, ValueError) else value
        yield RecordLocation(file, unit, number, read_bytes), record


class RecordOutcome(Enum):
    """Names what can happen to a record other than being used whole. One conversation may have several outcomes."""

    BAD = "bad, skipped"
    EMPTY = "empty, skipped"
    NO_ANSWER = "without an assistant turn, dropped"
    NOTHING = "without a token that its template marks as the assistant's, dropped"
    NOTHING_LABELLED = "without a token to learn, dropped"
    UNFINISHED = "cut off by the sampler, dropped as data.unfinished asks"
    ALIKE = "with twice the same answer, dropped"
    TRAILING = "with turns after the last answer, which were left out"
    SPLIT = "made into several sequences, as the template writes earlier answers otherwise"
    UNOPENED = (
        "with an answer that does not begin as the template's prompt, which opens or skips a thought; "
        "data.chat_template_args, such as {enable_thinking: false}, may make them agree"
    )
    NO_THOUGHTS = "with thoughts of earlier turns, which the template leaves out"
    UNSCORED = "without log-probabilities of the sampler, so that nothing bounds how far several epochs go"
    NO_ADVANTAGE = "with an advantage of 0: alone in their groups, or with the reward of all in them"
    CUT_AT_TURN = "too long, cut after an answer"
    CUT_INSIDE = "too long, cut inside an answer"
    CUT = "too long, cut at the end"
    TOO_LONG = "too long, dropped"


DROPPED = (
    RecordOutcome.BAD, RecordOutcome.EMPTY, RecordOutcome.NO_ANSWER, RecordOutcome.NOTHING,
    RecordOutcome.NOTHING_LABELLED, RecordOutcome.UNFINISHED, RecordOutcome.ALIKE, RecordOutcome.TOO_LONG,
)  # fmt: skip
CUT = (RecordOutcome.CUT_AT_TURN, RecordOutcome.CUT_INSIDE, RecordOutcome.CUT)


class RecordTally:
    """Counts records, sequences and tokens while they are read. Use a new one for each pass over the data."""

    def __init__(self, bad_records: BadRecords = "error") -> None:
        self._bad_records = bad_records
        self._locations: dict[RecordOutcome, list[str]] = defaultdict(list)
        self.counts: Counter[RecordOutcome] = Counter()
        self.num_records = 0
        self.longest = 0  # tokens of the longest sequence, before it was cut
        self.num_sequences = self.num_mismatched = 0
        self.num_tokens = 0
        self.num_supervised = 0
        self.unused_files: list[list[Any]] = []  # that unused records name: path, and identity if it is there

    @property
    def num_cut(self) -> int:
        return sum(self.counts[outcome] for outcome in CUT)

    @property
    def num_dropped(self) -> int:
        return sum(self.counts[outcome] for outcome in DROPPED)

    def bad(self, location: RecordLocation, problem: RecordError | str) -> None:
        """Count a bad record, or raise ConfigError with its location and problem if bad records are errors."""
        if self._bad_records == "error":
            stop = "" if str(problem).endswith("?") else "."
            raise ConfigError(f"data.path: {location}: {problem}{stop} Fix the record, or set data.bad_records: skip")
        self.note(RecordOutcome.BAD, f"{location}: {problem}")

    def note(self, outcome: RecordOutcome, location: RecordLocation | str) -> None:
        """Count an outcome, and remember the locations of the first few records that have it."""
        self.counts[outcome] += 1
        if len(self._locations[outcome]) < REMEMBERED:
            self._locations[outcome].append(str(location))

    def locations(self, outcome: RecordOutcome) -> tuple[str, ...]:
        """Return the locations of the first records of an outcome, those of bad ones with the problem."""
        return tuple(self._locations[outcome])

    def count_sequence(self, loss_weights: NDArray[np.float32], *, is_mismatched: bool = False) -> None:
        """Count a sequence by its loss weights. Its first token is never a target. A mismatched one is not learned."""
        if is_mismatched:
            self.num_mismatched += 1
            return
        self.num_sequences += 1
        self.num_tokens += loss_weights.size
        self.num_supervised += int(np.count_nonzero(loss_weights[1:]))

    def check_learned(self) -> None:
        """Raise ConfigError, saying what became of the records, if no sequence was learned."""
        if not self.num_sequences:
            fits = f"data.seq_len={self.longest - 1} would hold the longest record"
            raise NothingToLearnError(
                "data.path: nothing to learn", *self.lines(), *[fits] * (RecordOutcome.TOO_LONG in self.counts)
            )

    def lines(self) -> list[str]:
        """Return a line with the totals, and a line for each outcome that occurred with its first locations."""
        mismatched = f"; {self.num_mismatched} mismatched answers, not learned" if self.num_mismatched else ""
        lines = [
            f"{format_quantity(self.num_records, 'record')}: {format_quantity(self.num_sequences, 'sequence')}, "
            f"{self.num_tokens} tokens, {self.num_supervised} of them learned{mismatched}"
        ]
        for outcome in RecordOutcome:
            if count := self.counts[outcome]:
                more = "; …" if count > NUM_SHOWN else ""
                lines.append(f"{count} {outcome.value} ({'; '.join(self._locations[outcome][:NUM_SHOWN])}{more})")
        return lines
