"""Locates records in files. Processes that read no records import this without the readers and pyarrow."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RecordLocation:
    """Locates a record: a line of JSON lines or CSV, a record of a JSON list, or a row of another table, from 1.

    unit: empty for a text file, which is one document.
    read_bytes: about how many bytes of the file have been read up to and including it, for a progress bar.
    """

    file: Path
    unit: str
    number: int
    read_bytes: int = field(compare=False)

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}" if self.unit else str(self.file)
