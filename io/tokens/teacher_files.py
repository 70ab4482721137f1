"""Writes and reads what a teacher predicts: its likeliest tokens at each token that windows are cut from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.tokens.mapped_file import map_file

TEACHER_NAME = "teacher.bin"
BLOCK_RECORDS = 1 << 16  # read at a time

Records = NDArray[np.void]  # [n], of one RecordSize


@dataclass(frozen=True)
class RecordSize:
    """Says how many ids a record has, and how many log-probabilities: one more if the vocabulary has other ids."""

    num_ids: int
    num_logprobs: int

    @property
    def kind(self) -> np.dtype[Any]:
        return np.dtype([("ids", "<i4", (self.num_ids,)), ("logprobs", "<f4", (self.num_logprobs,))])

    def parsed(self, values: NDArray[np.float32]) -> Records:
        """Return the records [n] whose bits `values` are, FP32 [n, num_ids + num_logprobs]."""
        records: Records = np.ascontiguousarray(values).view(self.kind)[:, 0]
        return records


def write_records(folder: Path, places: NDArray[np.int64], records: Records) -> None:
    """Write the records of these places, [n] each, into a file of all, and wait until they are durable. Raises OSError.

    What is zero, because the target does not count, stays a hole of the file, which takes no room on most disks.
    """
    written = np.flatnonzero(records["logprobs"].any(axis=1))
    with (folder / TEACHER_NAME).open("r+b") as file:
        for run in np.split(written, np.flatnonzero(np.diff(places[written]) != 1) + 1):
            if run.size:
                file.seek(int(places[run[0]]) * records.dtype.itemsize)
                file.write(records[run].tobytes())
        file.flush()
        os.fsync(file.fileno())


def known_probability(records: Records, size: RecordSize) -> float:
    """Return the probability that the ids of records have, as a sum over the records that are not zero."""
    total = 0.0
    for start in range(0, len(records), BLOCK_RECORDS):
        logprobs = records[start : start + BLOCK_RECORDS]["logprobs"].astype(np.float64)
        total += float(np.exp(logprobs[logprobs.any(axis=1), : size.num_ids]).sum())
    return total


def open_records(folder: Path, size: RecordSize, num_places: int) -> Records:
    """Memory-map the records of a source, whose file has the right size."""
    return map_file(folder / TEACHER_NAME, size.kind, num_places)
