"""Writes and reads a folder of log-probabilities: one FP32 number for each token that windows are cut from.

That of a teacher holds its predictions as well (teacher_files.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.files.atomic_file import left_by_kills, write_atomically
from megatrain_ray.io.files.disk_errors import DiskError, explained
from megatrain_ray.io.tokens.mapped_file import map_file
from megatrain_ray.io.tokens.teacher_files import (
    TEACHER_NAME,
    RecordSize,
    known_probability,
    open_records,
    write_records,
)
from megatrain_ray.io.tokens.token_files import META_NAME, WEIGHT_TYPE, Logprobs, checksum
from megatrain_ray.read_file import parse_json

LOGPROBS_NAME = "logprobs.bin"
PROGRESS_NAME = "progress.json"
SYNC_S = 5.0  # seconds of a pass that a kill costs at most


@dataclass(frozen=True)
class LogprobMeta:
    """Describes the file of a folder, as its meta.json records it.

    num_values: numbers in the file. Tokens that are no supervised targets have 0.
    num_targets: how many are of supervised targets.
    mean: over the supervised targets.
    record: of a teacher's predictions; None: there are none.
    known: probability that the ids of records have, mean over the supervised targets.
    """

    num_values: int
    num_targets: int
    mean: float
    crc32: int
    record: RecordSize | None = None
    known: float = 1.0

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, by name, in the order of the checksum."""
        return _sizes(self.num_values, self.record)


@dataclass(frozen=True)
class WrittenRows:
    """Says how much of a folder is written durably.

    num_rows: windows of the source, from its first one on.
    num_targets: supervised targets in these.
    """

    num_rows: int
    num_targets: int


class LogprobWriter:
    """Writes the log-probabilities of one source batch by batch, in any order, and goes on where a killed one stopped.

    progress.json says how many rows are durable. meta.json says that all are, once `finish` has replaced it. Methods
    raise DiskError if the disk fails, or a file is gone or has another size than before.
    """

    def __init__(self, folder: Path, record: RecordSize | None = None) -> None:
        """Go on with a folder that `begin_logprobs` filled. `record`: of a teacher's predictions; None: there are none.

        Raises OSError, and ValueError, KeyError, TypeError for a damaged folder.
        """
        for left in left_by_kills(folder, (META_NAME, PROGRESS_NAME)):
            left.unlink()
        self._folder = folder
        self._record = record
        self._provenance = parse_json((folder / META_NAME).read_bytes())["provenance"]
        self.written = self._durable = WrittenRows(**parse_json((folder / PROGRESS_NAME).read_bytes()))
        self._values: Logprobs = np.memmap(folder / LOGPROBS_NAME, WEIGHT_TYPE, "r+")
        self._ahead: dict[int, WrittenRows] = {}  # by their start: written rows that follow ones that are not written
        self._synced_s = time.monotonic()

    def write(self, rows: range, places: NDArray[np.int64], values: Logprobs, num_targets: int) -> None:
        """Write these rows of the source. Raises MegatrainError also if a value is not a number.

        places: where the values are written, [rows, seq_len]; -1 for a pad.
        values: of the same shape, with more rows perhaps. With records a third dimension holds each value, then the
            bits of its record.
        num_targets: supervised ones among them.
        """
        real = places >= 0
        if np.isnan(values).any():
            raise MegatrainError(
                f"rows {rows.start} to {rows.stop}: the model gives some targets no probability: a logit is not a "
                "number; its weights or the data are damaged, or bf16 is too narrow for it: try train.precision: fp32"
            )
        written = values[: len(places)][real]
        self._check_sizes()  # what is written to memory past the end of a file kills the process
        if self._record is not None:
            with explained("write", self._folder / TEACHER_NAME):
                write_records(self._folder, places[real], self._record.parsed(written[:, 1:]))
            written = written[:, 0]
        self._values[places[real]] = written
        if rows.start >= self.written.num_rows:  # else they are written again, after the death of a process
            self._ahead[rows.start] = WrittenRows(len(rows), num_targets)
        while added := self._ahead.pop(self.written.num_rows, None):
            done = self.written
            self.written = WrittenRows(done.num_rows + added.num_rows, done.num_targets + added.num_targets)
        with explained("write", self._folder / LOGPROBS_NAME):
            os.utime(self._folder / LOGPROBS_NAME)  # by this a process that waits for the folder sees that it goes on
        if time.monotonic() - self._synced_s >= SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Make what is written durable."""
        if self.written != self._durable:
            with explained("write", self._folder / LOGPROBS_NAME):
                self._values.flush()  # type: ignore[attr-defined]  # of a memmap
            write_atomically(self._folder / PROGRESS_NAME, json.dumps(asdict(self.written)))
            self._durable = self.written
        self._synced_s = time.monotonic()

    def finish(self) -> LogprobMeta:
        """Write the description of the folder, which completes it, and return it."""
        self.sync()
        self._check_sizes()
        num_targets = self.written.num_targets
        mean = float(self._values.sum(dtype=np.float64)) / max(num_targets, 1)
        meta = LogprobMeta(self._values.size, num_targets, mean, 0, self._record)
        if self._record is not None:
            records = open_records(self._folder, self._record, self._values.size)
            meta = replace(meta, known=known_probability(records, self._record) / max(num_targets, 1))
        meta = replace(meta, crc32=checksum([self._folder / name for name in meta.sizes()]))
        tree = {"provenance": self._provenance, "logprobs": asdict(meta)}
        write_atomically(self._folder / META_NAME, json.dumps(tree, indent=1))
        return meta

    def _check_sizes(self) -> None:
        for name, size in _sizes(self._values.size, self._record).items():
            with explained("write", file := self._folder / name):
                found = file.stat().st_size
            if found != size:
                raise DiskError(f"{file} has {found} bytes instead of {size}: another program cut it off; start again")


def begin_logprobs(
    folder: Path, provenance: Mapping[str, Any], num_values: int, record: RecordSize | None = None
) -> None:
    """Fill a new folder for a LogprobWriter. The disk space of all values is taken, but not of records. Raises OSError.

    num_values: tokens that the source's windows are cut from.
    record: as for LogprobWriter.
    """
    for name, size in _sizes(num_values, record).items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
            if name == LOGPROBS_NAME:  # else a full disk would kill the process as it writes to memory
                os.posix_fallocate(file.fileno(), 0, size)
    (folder / PROGRESS_NAME).write_text(json.dumps(asdict(WrittenRows(0, 0))), encoding="utf-8")
    (folder / META_NAME).write_text(json.dumps({"provenance": provenance}, indent=1), encoding="utf-8")


def begun_logprobs(folder: Path, num_values: int, record: RecordSize | None = None) -> LogprobWriter | None:
    """Return a writer that goes on with a folder; None if it holds no begun log-probabilities of so many tokens.

    One that was finished and is damaged since is not begun.
    """
    try:
        is_begun = "logprobs" not in parse_json((folder / META_NAME).read_bytes())
        sizes = _sizes(num_values, record)
        if is_begun and all((folder / name).stat().st_size == size for name, size in sizes.items()):
            return LogprobWriter(folder, record)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _sizes(num_values: int, record: RecordSize | None) -> dict[str, int]:
    """Return the size of each file in bytes, by name. `record`: of a teacher's predictions; None: there are none."""
    sizes = {LOGPROBS_NAME: num_values * WEIGHT_TYPE.itemsize}
    if record is not None:
        sizes[TEACHER_NAME] = num_values * record.kind.itemsize
    return sizes


def read_logprob_meta(folder: Path) -> LogprobMeta | None:
    """Return the description of a folder of log-probabilities; None if it is missing, strange or truncated."""
    try:
        tree = parse_json((folder / META_NAME).read_bytes())["logprobs"]
        record = tree.get("record") and RecordSize(**tree["record"])
        meta = LogprobMeta(**tree | {"record": record})
        sizes = {name: (folder / name).stat().st_size for name in meta.sizes()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_sound = type(meta.num_targets) is int and type(meta.mean) is float
    whole = is_sound and sizes == meta.sizes() and 0 <= meta.num_targets <= meta.num_values
    return meta if whole else None


def holds_logprobs(folder: Path) -> bool:
    """Return whether the folder holds what was written, byte for byte. Reads and checksums all of it."""
    meta = read_logprob_meta(folder)
    return meta is not None and checksum([folder / name for name in meta.sizes()]) == meta.crc32


def open_logprobs(name: str, folder: Path, num_values: int) -> NDArray[Any]:
    """Memory-map the numbers of a source, or its records if it has some.

    Raises ConfigError if they are gone, or are of other data.
    """
    meta = read_logprob_meta(folder)
    if meta is None or meta.num_values != num_values:
        raise ConfigError(
            f"data.path: the log-probabilities of {name} are not in {folder}, where they were when the run started; "
            "start again"
        )
    if meta.record is not None:
        return open_records(folder, meta.record, num_values)
    return map_file(folder / LOGPROBS_NAME, WEIGHT_TYPE, num_values)
