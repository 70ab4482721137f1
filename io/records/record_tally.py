"""What became of the records of a data set: counted by kind, with the first places of each."""

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
    """What can happen to a record but being learned whole; a conversation may meet several."""

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
    """Counts while chats are read. One object a pass over the data."""

    def __init__(self, bad_records: BadRecords = "error") -> None:
        self._bad_records = bad_records
        self._places: dict[Fate, list[str]] = defaultdict(list)
        self.counts: Counter[Fate] = Counter()
        self.num_records = 0
        self.num_sequences = 0
        self.num_tokens = 0
        self.num_supervised = 0

    def bad(self, place: Place, problem: str) -> None:
        """Raises ConfigError with place and problem, or counts where bad records are skipped."""
        if self._bad_records == "error":
            raise ConfigError(f"data.path: {place}: {problem}. Fix the record, or set data.bad_records: skip")
        self.note(Fate.BAD, f"{place}: {problem}")

    def note(self, fate: Fate, place: Place | str) -> None:
        """Counts, and remembers the place of the first few."""
        self.counts[fate] += 1
        if len(self._places[fate]) < PLACES_TOLD:
            self._places[fate].append(str(place))

    def learn(self, supervised: NDArray[np.bool_]) -> None:
        """Counts a sequence by its mask; its first token is nobody's target."""
        self.num_sequences += 1
        self.num_tokens += supervised.size
        self.num_supervised += int(supervised[1:].sum())

    def lines(self) -> list[str]:
        """The whole in one line, and a line for every kind of exception with its first places."""
        lines = [
            f"{self.num_records} records: {self.num_sequences} sequences, {self.num_tokens} tokens, "
            f"{self.num_supervised} of them learned"
        ]
        for fate in Fate:
            if count := self.counts[fate]:
                more = "; …" if count > PLACES_TOLD else ""
                lines.append(f"{count} {fate.value} ({'; '.join(self._places[fate])}{more})")
        return lines
