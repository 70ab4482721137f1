"""Counts what became of the records of a data set, by kind, and remembers the first locations of each kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.read_records import Place

BadRecords = Literal["error", "skip"]
PLACES_TOLD = 3


class Fate(Enum):
    """Names what can happen to a record other than being used whole. One conversation may have several fates."""

    BAD = "bad, skipped"
    NO_ANSWER = "without an assistant turn, dropped"
    NOTHING = "without a token that its template marks as the assistant's, dropped"
    NOTHING_LABELLED = "without a token to learn, dropped"
    TRAILING = "with turns after the last answer, which were left out"
    SPLIT = "made into several sequences, as the template writes earlier answers otherwise"
    CUT_AT_TURN = "too long, cut after an answer"
    CUT_INSIDE = "too long, cut inside an answer"
    CUT = "too long, cut at the end"
    TOO_LONG = "too long, dropped"


class ChatTally:
    """Counts records, sequences and tokens while chats are read. Use a new one for each pass over the data."""

    def __init__(self, bad_records: BadRecords = "error") -> None:
        self._bad_records = bad_records
        self._places: dict[Fate, list[str]] = defaultdict(list)
        self.counts: Counter[Fate] = Counter()
        self.num_records = 0
        self.num_sequences = 0
        self.num_tokens = 0
        self.num_supervised = 0

    def bad(self, place: Place, problem: str) -> None:
        """Count a bad record, or raise ConfigError with its location and problem if bad records are errors."""
        if self._bad_records == "error":
            raise ConfigError(f"data.path: {place}: {problem}. Fix the record, or set data.bad_records: skip")
        self.note(Fate.BAD, f"{place}: {problem}")

    def note(self, fate: Fate, place: Place | str) -> None:
        """Count a fate, and remember the locations of the first few records that met it."""
        self.counts[fate] += 1
        if len(self._places[fate]) < PLACES_TOLD:
            self._places[fate].append(str(place))

    def learn(self, supervised: NDArray[np.bool_]) -> None:
        """Count a sequence by its loss mask. Its first token is never a target."""
        self.num_sequences += 1
        self.num_tokens += supervised.size
        self.num_supervised += int(supervised[1:].sum())

    def lines(self) -> list[str]:
        """Return a line with the totals, and a line for each fate that occurred with its first locations."""
        lines = [
            f"{self.num_records} records: {self.num_sequences} sequences, {self.num_tokens} tokens, "
            f"{self.num_supervised} of them learned"
        ]
        for fate in Fate:
            if count := self.counts[fate]:
                more = "; …" if count > PLACES_TOLD else ""
                lines.append(f"{count} {fate.value} ({'; '.join(self._places[fate])}{more})")
        return lines
