"""Defines a finding of `megatrain doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    GOOD = "good"
    NOTE = "note"  # works, but could be improved
    SLOW = "slow"
    STOP = "stop"


@dataclass(frozen=True)
class Finding:
    """Describes one finding of `megatrain doctor`.

    advice: what to do about it; empty if nothing has to be done.
    """

    topic: str
    severity: Severity
    text: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.severity.value:<5} {self.topic:<15} {self.text}{advice}"
