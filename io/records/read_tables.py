"""Reads the rows of tables (Parquet, Arrow, CSV) as mappings from column to value, and the columns that they have."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from megatrain_ray.io.records.file_formats import ARROW, CSV, PARQUET, TSV, open_bytes, suffix_of
from megatrain_ray.read_file import regular_file

ROWS = 256  # rows decoded at a time
ARROW_FILE_MAGIC = b"ARROW1"  # Arrow has a format of files and one of streams; `datasets` writes the latter
DELIMITERS = {CSV: ",", TSV: "\t"}
TABLES = (PARQUET, ARROW, *DELIMITERS)
BOM = "\ufeff"


class TableRow(NamedTuple):
    """Holds a row, its number in the file from 1, and about how many bytes have been read up to and including it.

    number: a row of Parquet and Arrow, the first line of a row of CSV.
    value: a mapping, or the ValueError that says why the row cannot be decoded.
    """

    number: int
    read_bytes: int
    value: Any


def read_rows(file: Path, columns: Sequence[str] | None = None) -> Iterator[TableRow]:
    """Yield the rows of a table in order. The cells of a CSV file are texts.

    columns: the columns to read; None: all.

    Raises OSError, ArrowException and csv.Error, which also say that a file is cut off or damaged.
    """
    if suffix_of(file) in DELIMITERS:
        yield from _csv_rows(file)
        return
    size, number = file.stat().st_size, 0
    with ExitStack() as stack:
        num_rows, batches = _batches(file, columns, stack)
        for batch in batches:
            for row in range(batch.num_rows):  # one at a time: texts may be long, and one of them bad
                number += 1
                yield TableRow(number, size * number // max(num_rows, number), _row(batch, row))


def table_columns(file: Path) -> pyarrow.Schema:
    """Return the names and types of a table's columns. Raises as read_rows."""
    if suffix_of(file) in DELIMITERS:
        with open_bytes(file) as (_, stream):
            header = next(csv.reader(_lines(stream), delimiter=DELIMITERS[str(suffix_of(file))]), [])
        return pyarrow.schema([(name, pyarrow.string()) for name in header])
    if suffix_of(file) == PARQUET:
        return pyarrow.parquet.read_schema(regular_file(file))
    with _arrow(file) as reader:
        return reader.schema


def _batches(file: Path, columns: Sequence[str] | None, stack: ExitStack) -> tuple[int, Iterable[Any]]:
    """Return the number of rows, 0 if the file does not say it, and the batches of an open Parquet or Arrow file."""
    if suffix_of(file) == PARQUET:
        table = stack.enter_context(pyarrow.parquet.ParquetFile(regular_file(file)))
        return table.metadata.num_rows, table.iter_batches(ROWS, columns=columns)
    reader = stack.enter_context(_arrow(file))
    batches = map(reader.get_batch, range(reader.num_record_batches)) if _is_file(reader) else reader
    return 0, ((batch.select(columns) if columns is not None else batch) for batch in batches)


@contextmanager
def _arrow(file: Path) -> Iterator[Any]:
    with pyarrow.memory_map(str(regular_file(file))) as source:
        is_file = source.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
        source.seek(0)
        with (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source) as reader:
            yield reader


def _is_file(reader: Any) -> bool:
    return isinstance(reader, pyarrow.ipc.RecordBatchFileReader)


def _row(batch: Any, row: int) -> Any:
    try:
        return batch.slice(row, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return error


def _csv_rows(file: Path) -> Iterator[TableRow]:
    """Yield the rows below the header, which names the columns. Lines without a cell are passed over."""
    csv.field_size_limit(sys.maxsize)  # a text may be longer than the 128 KiB that are allowed without this
    with open_bytes(file) as (raw, stream):
        reader = csv.reader(_lines(stream), delimiter=DELIMITERS[str(suffix_of(file))], strict=True)
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise csv.Error(f"two columns of its header have one name: {', '.join(header)}")
        before = reader.line_num
        for cells in reader:
            number, before = before + 1, reader.line_num
            if len(cells) == len(header):
                yield TableRow(number, raw.tell(), dict(zip(header, cells, strict=True)))
            elif cells:
                problem = ValueError(f"has {len(cells)} cells, and the header {len(header)}")
                yield TableRow(number, raw.tell(), problem)


def _lines(stream: IO[bytes]) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise csv.Error(f"line {number} is not UTF-8: byte 0x{line[error.start]:02x}") from None
        yield text.removeprefix(BOM) if number == 1 else text
