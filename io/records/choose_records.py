"""Chooses the records of a data source that are used: its first ones, and of these a part by a hash of each record."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.read_records import RecordError, read_records
from megatrain_ray.io.records.record_location import RecordLocation

HASH_BITS = 53  # of a float: every hash is then exact
LAST = math.nextafter(1.0, 0.0)


@dataclass(frozen=True)
class RecordChoice:
    """Says which records of a source are used; by default all.

    max_records: so many from the start of the source; None: all.
    hash_range: of these, those whose hash is in [start, stop). Hashes are evenly spread over [0, 1).
    """

    max_records: int | None = None
    hash_range: tuple[float, float] = (0.0, 1.0)

    def settings(self) -> dict[str, Any]:
        """Return the choice as data for JSON; nothing if all records are used, so that earlier tokens are found."""
        return {} if self == ALL_RECORDS else {"choice": asdict(self)}


ALL_RECORDS = RecordChoice()


class RecordChooser:
    """Makes a choice of the records of one source in one pass, file after file."""

    def __init__(self, choice: RecordChoice = ALL_RECORDS) -> None:
        """Begin a pass over the records of a source."""
        self._choice = choice
        self._left = self._choice.max_records
        self._num_seen = self._num_chosen = 0
        self._where = ""
        self._least, self._most = 1.0, 0.0  # of the hashes seen

    def of(self, records: Iterable[tuple[RecordLocation, Any]], field: str | None = None) -> Iterator[Any]:
        """Yield the chosen ones of the records, which follow those of earlier calls.

        field: the key whose value alone decides; None: all of a record does. A record that could not be decoded is
            never among held-out ones.
        """
        for location, record in islice(records, self._left):
            if self._takes(location, partial(_place_of_record, record, field)):
                yield location, record

    def restart(self) -> None:
        """Count the first records anew: those that follow are of another data set of the source."""
        self._left = self._choice.max_records

    def takes_file(self, location: RecordLocation, content: Iterable[bytes]) -> bool:
        """Return whether a file that is one record is chosen. `content`: is read only if it decides."""
        return self._left != 0 and self._takes(location, partial(_place, content))

    def _takes(self, location: RecordLocation, place: Callable[[], float]) -> bool:
        self._left = None if self._left is None else self._left - 1
        self._num_seen += 1
        self._where = str(location)
        start, stop = self._choice.hash_range
        if (start, stop) == (0.0, 1.0):
            self._num_chosen += 1
            return True
        there = place()
        self._least, self._most = min(self._least, there), max(self._most, there)
        self._num_chosen += start <= there < stop
        return start <= there < stop

    def check(self) -> None:
        """Raise ConfigError if there were records and all of them are on the other side of data.eval_fraction."""
        if self._num_chosen or not self._num_seen:
            return
        start, stop = self._choice.hash_range
        does = f"{stop:g} holds out" if stop < 1 else f"{start:g} leaves for training"
        hundredths = math.floor(100 * self._least) + 1 if stop < 1 else math.floor(100 * self._most)
        raise ConfigError(
            f"data.eval_fraction: {does} none of {self._num_seen} records (the last is {self._where}), by the hash of "
            f"each; {hundredths / 100:g} is the first that does, or set data.eval_path"
        )


def chosen_records(files: Sequence[Path], choice: RecordChoice) -> Iterator[tuple[RecordLocation, Any]]:
    """Yield the chosen records of a source, file after file. Raises as read_records, and ConfigError if it has none."""
    chooser = RecordChooser(choice)
    for file in files:
        yield from chooser.of(read_records(file))
    chooser.check()


def _place_of_record(record: Any, field: str | None) -> float:
    """Return the hash of a record in [0, 1). It is the same in every file format, whatever the order of keys."""
    if isinstance(record, RecordError):
        return LAST
    value = record[field] if field is not None and isinstance(record, dict) and field in record else record
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return _place([text.encode("utf-8", "surrogatepass")])


def _place(content: Iterable[bytes]) -> float:
    digest = hashlib.blake2b(digest_size=8)
    for part in content:
        digest.update(part)
    return float(int.from_bytes(digest.digest()) >> (64 - HASH_BITS)) / float(1 << HASH_BITS)
