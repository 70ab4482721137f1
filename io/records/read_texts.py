"""Reads files as texts: a .txt file is one document, and so is each record of JSON or row of a table."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.choose_records import RecordChooser
from megatrain_ray.io.records.file_formats import TEXT, open_bytes, suffix_of
from megatrain_ray.io.records.read_records import (
    RecordError,
    RecordOutcome,
    RecordTally,
    as_mapping,
    check_unicode,
    missing_key,
    read_records,
    unreadable,
)
from megatrain_ray.io.records.read_tables import TABLES, table_columns
from megatrain_ray.io.records.record_location import RecordLocation

BLOCK_BYTES = 1 << 20  # bytes of a .txt file read at a time


class TextBlock(NamedTuple):
    """Holds a part of a document.

    ends: whether this is the document's last part.
    location: of the document, and about how far in the file the part ends.
    """

    text: str
    ends: bool
    location: RecordLocation


def read_texts(
    file: Path, text_field: str, tally: RecordTally, chooser: RecordChooser | None = None
) -> Iterator[TextBlock]:
    """Yield the documents of a file in their order: long .txt files in several blocks, empty ones not at all.

    chooser: of the documents that are used; None: all are.

    A byte order mark at the start of a file is dropped; line ends are kept as they are. Raises ConfigError naming file
    and line, row or offset for what cannot be read or ends too early, and for a bad record unless `tally` skips those.
    """
    suffix = suffix_of(file)
    chooser = chooser or RecordChooser()
    if suffix == TEXT:
        yield from _read_plain(file, tally, chooser)
        return
    if suffix in TABLES:
        _check_column(file, text_field)
    for location, record in chooser.of(read_records(file, columns=[text_field]), text_field):
        try:
            text = _text_of(record, text_field)
        except RecordError as problem:
            tally.bad(location, problem)
            continue
        if text:
            yield TextBlock(text, True, location)
        else:
            tally.note(RecordOutcome.EMPTY, location)


def _read_plain(file: Path, tally: RecordTally, chooser: RecordChooser) -> Iterator[TextBlock]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held, num_bytes = "", 0
    try:
        if not chooser.takes_file(RecordLocation(file, "", 1, 0), _content(file)):
            return
        with open_bytes(file) as (raw, stream):
            while data := stream.read(BLOCK_BYTES):
                num_bytes += len(data)
                text = _decoded(decoder, data, file, num_bytes)
                if held and text:
                    yield TextBlock(held, False, RecordLocation(file, "", 1, raw.tell()))
                held = text or held
    except (OSError, pyarrow.ArrowException) as error:
        raise unreadable(file, error, f" after {num_bytes} bytes of text" if num_bytes else "") from None
    held += _decoded(decoder, b"", file, num_bytes)
    location = RecordLocation(file, "", 1, file.stat().st_size)
    if held:
        yield TextBlock(held, True, location)
    else:
        tally.note(RecordOutcome.EMPTY, location)


def _content(file: Path) -> Iterator[bytes]:
    with open_bytes(file) as (_, stream):
        while data := stream.read(BLOCK_BYTES):
            yield data


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


def _text_of(record: Any, text_field: str) -> str:
    fields = as_mapping(record)
    if text_field not in fields:
        chats = "; chats? set data.kind: sft" if {"messages", "conversations", "completion"} & fields.keys() else ""
        raise RecordError(f"{missing_key(fields, text_field, ' (data.text_field)')}{chats}")
    text = fields[text_field]
    if not isinstance(text, str):
        raise RecordError(f"{text_field}: expected a text, got {text!r:.60}")
    return check_unicode(text, text_field)


def _check_column(file: Path, text_field: str) -> None:
    """Raise ConfigError if a table has no column of texts of this name, or cannot be read."""
    try:
        schema = table_columns(file)
    except (OSError, pyarrow.ArrowException, csv.Error) as error:
        raise unreadable(file, error) from None
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
