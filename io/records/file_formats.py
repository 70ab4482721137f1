"""Knows the formats of data files by their suffixes, and opens compressed files."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow

from megatrain_ray.read_file import regular_file

TEXT, JSON, JSONL, CSV, TSV, PARQUET, ARROW = ".txt", ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # by the suffix behind that of the format
COMPRESSIBLE = (TEXT, JSON, JSONL, CSV, TSV)  # the others compress their columns themselves
RECORD_SUFFIXES = (JSON, JSONL, CSV, TSV, PARQUET, ARROW)  # of files that hold records, for every kind of data
TEXT_SUFFIXES = (TEXT, *RECORD_SUFFIXES)  # of files that hold texts
CHUNK_BYTES = 1 << 20


FORMATS = {suffix: (suffix, "") for suffix in TEXT_SUFFIXES} | {
    suffix + packed: (suffix, compression) for suffix in COMPRESSIBLE for packed, compression in COMPRESSIONS.items()
}  # format and compression by the end of a name


def suffix_of(file: Path) -> str | None:
    """Return the suffix of a file's format, without that of a compression; None for an unknown format."""
    return _format_of(file)[0]


def describe_suffixes(suffixes: Sequence[str]) -> str:
    """Return suffixes as messages list them."""
    return ", ".join(f"{suffix} (or {suffix}.gz, .zst)" if suffix == JSONL else suffix for suffix in suffixes)


def _format_of(file: Path) -> tuple[str | None, str]:
    name = file.name.lower()
    return next((known for end, known in FORMATS.items() if name.endswith(end)), (None, ""))


@contextmanager
def open_bytes(file: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the file as it is on disk, whose `tell` gives the bytes read, and a buffered reader of its content.

    The content is decompressed.

    Raises OSError and ArrowException for what cannot be read, also for a compressed file that ends too early.
    """
    _, compression = _format_of(regular_file(file))
    if not compression:
        with file.open("rb", buffering=CHUNK_BYTES) as plain:
            yield plain, plain
        return
    # Arrow's stream raises if a frame of zstd ends too early; that of the zstandard package would end silently.
    with pyarrow.OSFile(str(file)) as raw, pyarrow.CompressedInputStream(raw, compression) as stream:
        yield raw, io.BufferedReader(stream, CHUNK_BYTES)
