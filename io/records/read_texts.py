"""Reads files as texts: a .txt file is one document, and so is each line of JSON or row of Parquet."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow
import pyarrow.parquet

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.find_files import PARQUET, TEXT, format_of
from megatrain_ray.io.records.read_records import BOM, ROWS, open_lines

BLOCK_BYTES = 1 << 20  # bytes read at a time
NUM_PLACES = 5  # locations of bad records that are remembered


class TextBlock(NamedTuple):
    """Holds a part of a document.

    ends: whether this is the document's last part.
    read_bytes: about how far in the file the part ends.
    """

    text: str
    ends: bool
    read_bytes: int


@dataclass
class Skips:
    """Decides what to do with records that hold no text, and counts those that were skipped."""

    policy: Literal["error", "skip"]
    num_bad: int = 0
    num_empty: int = 0
    places: list[str] = field(default_factory=list)  # locations of the first bad records, each with its problem

    def bad(self, place: str, problem: str) -> None:
        """Count a bad record, or raise ConfigError for it, as the policy says."""
        if self.policy == "error":
            raise ConfigError(f"data.path: {place}: {problem}; mend it, or set data.bad_records: skip")
        self.num_bad += 1
        if len(self.places) < NUM_PLACES:
            self.places.append(f"{place}: {problem}")

    def empty(self) -> None:
        """Count an empty text, which is no error."""
        self.num_empty += 1


class BadRecordError(Exception):
    """Says why a record holds no text."""


def read_texts(file: Path, text_field: str, skips: Skips) -> Iterator[TextBlock]:
    """Yield the documents of a file in their order: long .txt files in several blocks, empty ones not at all.

    A byte order mark at the start of a file is dropped; line ends are kept as they are. Raises ConfigError naming file
    and line, row or offset for what cannot be read or ends too early, and for a bad record unless `skips` counts those.
    """
    suffix = format_of(file)
    if suffix == TEXT:
        return _read_plain(file, skips)
    if suffix == PARQUET:
        return _read_parquet(file, text_field, skips)
    return _read_lines(file, text_field, skips)


def _read_plain(file: Path, skips: Skips) -> Iterator[TextBlock]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held, num_bytes = "", 0
    with _readable(file, lambda: f"offset {num_bytes}"), file.open("rb") as stream:
        while data := stream.read(BLOCK_BYTES):
            num_bytes += len(data)
            text = _decoded(decoder, data, file, num_bytes)
            if held and text:
                yield TextBlock(held, False, num_bytes)
            held = text or held
    held += _decoded(decoder, b"", file, num_bytes)
    if held:
        yield TextBlock(held, True, num_bytes)
    else:
        skips.empty()


def _decoded(decoder: codecs.IncrementalDecoder, data: bytes, file: Path, end: int) -> str:
    """Decode the next bytes of a file. Raises ConfigError if they are not UTF-8.

    data: the bytes; empty at the end of the file.
    end: offset of the end of `data` in the file.
    """
    try:
        return decoder.decode(data, final=not data)
    except UnicodeDecodeError as error:
        offset = end - len(error.object) + error.start
        raise ConfigError(
            f"data.path: {file} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset}; "
            "convert the file to UTF-8"
        ) from None


def _read_lines(file: Path, text_field: str, skips: Skips) -> Iterator[TextBlock]:
    number = 0
    with _readable(file, lambda: f"line {number + 1}"), open_lines(file) as (raw, lines):
        for number, line in enumerate(lines, 1):
            record = (line.removeprefix(BOM) if number == 1 else line).rstrip()
            if not record:
                continue
            try:
                text = _text_of(record, text_field)
            except BadRecordError as problem:
                skips.bad(f"{file}, line {number}", str(problem))
                continue
            if text:
                yield TextBlock(text, True, raw.tell())
            else:
                skips.empty()


def _text_of(line: bytes, text_field: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise BadRecordError(f"bad JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; too deeply nested brackets
        raise BadRecordError(f"bad JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadRecordError(f"expected an object with the key {text_field!r}, got {_kind(record)}")
    if text_field not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise BadRecordError(f"no key {text_field!r} (data.text_field), its keys are {keys}")
    return _checked(record[text_field], text_field)


def _checked(text: Any, text_field: str) -> str:
    if not isinstance(text, str):
        raise BadRecordError(f"{text_field!r} is {_kind(text)}, expected text")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            surrogate = ord(text[error.start])
            raise BadRecordError(f"{text_field!r} holds half a character (\\u{surrogate:04x}), not Unicode") from None
    return text


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _read_parquet(file: Path, text_field: str, skips: Skips) -> Iterator[TextBlock]:
    """Yield the texts of a Parquet file, reading one row group at a time and converting a few rows of it at a time."""
    row, size = 0, _size(file)
    with _readable(file, lambda: f"row {row + 1}"), pyarrow.parquet.ParquetFile(file) as table:
        _check_column(file, table.schema_arrow, text_field)
        for batch in table.iter_batches(ROWS, columns=[text_field]):
            for value in batch.column(0):
                row += 1
                try:
                    text = _checked(_python_text(value, text_field), text_field)
                except BadRecordError as problem:
                    skips.bad(f"{file}, row {row}", str(problem))
                    continue
                if text:
                    yield TextBlock(text, True, size * row // table.metadata.num_rows)
                else:
                    skips.empty()


def _python_text(value: Any, text_field: str) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise BadRecordError(f"{text_field!r} is not UTF-8: byte 0x{error.object[error.start]:02x}") from None


def _check_column(file: Path, schema: Any, text_field: str) -> None:
    if text_field not in schema.names:
        raise ConfigError(
            f"data.path: {file} has no column {text_field!r} (data.text_field), its columns are "
            f"{', '.join(map(repr, schema.names[:8])) or 'none'}"
        )
    kind = schema.field(text_field).type
    values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    strings = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    if not any(is_one(values) for is_one in strings):
        raise ConfigError(f"data.path: {file}: the column {text_field!r} is of type {kind}, expected string")


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {file}: {error.strerror}") from None


@contextmanager
def _readable(file: Path, where: Any) -> Iterator[None]:
    """Turn the errors of reading a file in the block into a ConfigError naming file and location.

    where: returns the location that reading had reached.
    """
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        what = getattr(error, "strerror", None) or str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"data.path: cannot read {file} at {where()}: {what}; it may be cut short: get the file again"
        ) from None
