"""Counts what became of the records of a data source, by kind, and remembers the first locations of each kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.read_records import RecordError, RecordLocation

BadRecords = Literal["error", "skip"]
REMEMBERED = 5  # locations of each outcome
NUM_SHOWN = 3  # of these, locations that a line of the report names


class RecordOutcome(Enum):
    """Names what can happen to a record other than being used whole. One conversation may have several outcomes."""

    BAD = "bad, skipped"
    EMPTY = "empty, skipped"
    NO_ANSWER = "without an assistant turn, dropped"
    NOTHING = "without a token that its template marks as the assistant's, dropped"
    NOTHING_LABELLED = "without a token to learn, dropped"
    TRAILING = "with turns after the last answer, which were left out"
    SPLIT = "made into several sequences, as the template writes earlier answers otherwise"
    CUT_AT_TURN = "too long, cut after an answer"
    CUT_INSIDE = "too long, cut inside an answer"
    CUT = "too long, cut at the end"
    TOO_LONG = "too long, dropped"


class RecordTally:
    """Counts records, sequences and tokens while they are read. Use a new one for each pass over the data."""

    def __init__(self, bad_records: BadRecords = "error") -> None:
        self._bad_records = bad_records
        self._locations: dict[RecordOutcome, list[str]] = defaultdict(list)
        self.counts: Counter[RecordOutcome] = Counter()
        self.num_records = 0
        self.num_sequences = 0
        self.num_tokens = 0
        self.num_supervised = 0

    def bad(self, location: RecordLocation, problem: RecordError | str) -> None:
        """Count a bad record, or raise ConfigError with its location and problem if bad records are errors."""
        if self._bad_records == "error":
            raise ConfigError(f"data.path: {location}: {problem}. Fix the record, or set data.bad_records: skip")
        self.note(RecordOutcome.BAD, f"{location}: {problem}")

    def note(self, outcome: RecordOutcome, location: RecordLocation | str) -> None:
        """Count an outcome, and remember the locations of the first few records that have it."""
        self.counts[outcome] += 1
        if len(self._locations[outcome]) < REMEMBERED:
            self._locations[outcome].append(str(location))

    def locations(self, outcome: RecordOutcome) -> tuple[str, ...]:
        """Return the locations of the first records of an outcome, those of bad ones with the problem."""
        return tuple(self._locations[outcome])

    def count_sequence(self, supervised: NDArray[np.bool_]) -> None:
        """Count a sequence by its loss mask. Its first token is never a target."""
        self.num_sequences += 1
        self.num_tokens += supervised.size
        self.num_supervised += int(supervised[1:].sum())

    def check_learned(self) -> None:
        """Raise ConfigError, saying what became of the records, if no sequence was learned."""
        if not self.num_sequences:
            raise ConfigError("\n".join(["data.path: nothing to learn", *self.lines()]))

    def lines(self) -> list[str]:
        """Return a line with the totals, and a line for each outcome that occurred with its first locations."""
        lines = [
            f"{self.num_records} records: {self.num_sequences} sequences, {self.num_tokens} tokens, "
            f"{self.num_supervised} of them learned"
        ]
        for outcome in RecordOutcome:
            if count := self.counts[outcome]:
                more = "; …" if count > NUM_SHOWN else ""
                lines.append(f"{count} {outcome.value} ({'; '.join(self._locations[outcome][:NUM_SHOWN])}{more})")
        return lines
