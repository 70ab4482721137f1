"""Reads the records of a file in order: a JSON list, JSON lines (plain or zstandard), or Parquet."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from megatrain_ray.errors import ConfigError

BOM = b"\xef\xbb\xbf"
CHUNK_BYTES = 1 << 20
ROWS = 256  # rows of a Parquet file converted to Python objects at a time
SUFFIXES = (".json", ".jsonl", ".jsonl.zst", ".parquet")


class RecordError(ValueError):
    """Says what is wrong with one record. Whoever reports it adds the location."""


@dataclass(frozen=True)
class Place:
    """Locates a record: a line of a .jsonl file, a record of a .json list, or a row of a .parquet file, from 1.

    read_bytes: about how many bytes of the file have been read up to and including it, for a progress bar.
    """

    file: Path
    unit: str
    number: int
    read_bytes: int = field(compare=False)

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


def has_records(file: Path) -> bool:
    """Return whether the file's name has a suffix that `read_records` knows."""
    return file.name.lower().endswith(SUFFIXES)


def read_records(file: Path) -> Iterator[tuple[Place, Any]]:
    """Yield every record with its location, in the order of the file. Blank lines are skipped.

    A record that cannot be decoded comes as the RecordError that says why, and reading continues after it. Raises
    ConfigError for a file that cannot be read, is cut off or has another suffix.
    """
    name = file.name.lower()
    try:
        if name.endswith(".parquet"):
            yield from _parquet(file)
        elif name.endswith((".jsonl", ".jsonl.zst")):
            with open_lines(file) as (raw, lines):
                yield from _decoded_lines(file, lines, raw)
        elif name.endswith(".json"):
            yield from _json(file)
        else:
            raise ConfigError(f"data.path: {file}: expected a file of records ({', '.join(SUFFIXES)}), got this name")
    except OSError as error:
        if error.errno is None:  # Arrow reports damage in this way
            what = str(error).partition("\n")[0].rstrip(".")
            raise ConfigError(f"data.path: {file} is cut off or is damaged: {what}; copy the file again") from None
        raise ConfigError(f"data.path: cannot read {file}: {error.strerror or error}") from None


@contextmanager
def open_lines(file: Path) -> Iterator[tuple[Any, IO[bytes]]]:
    """Yield the file as it is on disk, whose `tell` gives the bytes read, and its lines; a .zst is decompressed.

    Raises OSError, also if compressed data end too early or are damaged; that error has no errno.
    """
    if not file.name.lower().endswith(".zst"):
        with file.open("rb", buffering=CHUNK_BYTES) as plain:
            yield plain, plain
        return
    # Arrow's stream raises if a frame ends too early; that of the zstandard package would end silently.
    with pyarrow.OSFile(str(file)) as raw, pyarrow.CompressedInputStream(raw, "zstd") as stream:
        yield raw, io.BufferedReader(stream, CHUNK_BYTES)


def _json(file: Path) -> Iterator[tuple[Place, Any]]:
    """Yield the records of a .json file: a list, or JSON lines, which many tools write under this suffix."""
    content = file.read_bytes().removeprefix(BOM)
    if not content.lstrip().startswith(b"["):
        lines = io.BytesIO(content)
        yield from _decoded_lines(file, lines, lines)
        return
    records = _decoded(content)
    if isinstance(records, RecordError):
        raise ConfigError(f"data.path: {file} is {records}; expected a list of records")
    for number, record in enumerate(records, 1):
        yield Place(file, "record", number, len(content) * number // len(records)), record


def _decoded_lines(file: Path, lines: Iterable[bytes], raw: Any) -> Iterator[tuple[Place, Any]]:
    for number, line in enumerate(lines, 1):
        text = (line.removeprefix(BOM) if number == 1 else line).rstrip()
        if text:
            yield Place(file, "line", number, raw.tell()), _decoded(text)


def _decoded(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RecordError(f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}")
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        return RecordError(f"not valid JSON: {error.msg} at {where}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; too deeply nested brackets
        return RecordError(f"not valid JSON: {error}")


def _parquet(file: Path) -> Iterator[tuple[Place, Any]]:
    number, size = 0, file.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            rows = (row for batch in table.iter_batches(ROWS) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield Place(file, "row", number, size * number // table.metadata.num_rows), row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # without an errno, Arrow reports damage
            raise
        raise ConfigError(f"data.path: {file} is damaged or no Parquet file (after row {number}): {error}") from None
