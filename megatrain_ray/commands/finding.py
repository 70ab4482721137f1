"""What `megatrain doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    GOOD = "good"
    NOTE = "note"  # works, and something better may be had
    SLOW = "slow"
    STOP = "stop"


@dataclass(frozen=True)
class Finding:
    """`advice`: what to do about it, empty where there is nothing to do."""

    topic: str
    state: State
    text: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.state.value:<5} {self.topic:<15} {self.text}{advice}"
