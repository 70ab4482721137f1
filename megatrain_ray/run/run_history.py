"""Writes and reads history.jsonl of a run directory: starts and their settings, deaths, and ends (docs/metrics.md).

Rows are added and never cut: a resume adds those of its own start.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from megatrain_ray.errors import InterruptedRunError
from megatrain_ray.run.run_files import append_row, parse_rows, read_damaged

log = logging.getLogger(__name__)

HISTORY_NAME = "history.jsonl"
LARGEST = 1e18  # bytes or seconds of a row
LATEST_S = 1 << 33  # in the year 2242


class What(Enum):
    """Names what a row reports."""

    START = "start"
    MEMORY = "memory"  # how much host memory the run takes
    DIED = "died"  # a process of the run died
    REPLACED = "replaced"  # another one took its place
    END = "end"


@dataclass
class FinishedStart:
    """Holds why a start ended before all steps were made; None: all were."""

    reason: str | None = None


class History:
    """Appends rows to history.jsonl. A row that cannot be written is lost: it is no reason to end a training."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self._file = run_dir / HISTORY_NAME
        self._clock = clock

    def begin(self, step: int, steps: int, plan_sha256: str, **surroundings: Any) -> None:
        """Write that a run of `steps` updates was started after `step` of them, with further values."""
        self._append(What.START, step=step, steps=steps, plan_sha256=plan_sha256, pid=os.getpid(), **surroundings)

    @contextmanager
    def of_start(self, step: int, steps: int, plan_sha256: str, **surroundings: Any) -> Iterator[FinishedStart]:
        """Write a start, as `begin` does, and after the block how it ended. The block may give the reason."""
        self.begin(step, steps, plan_sha256, **surroundings)
        end = FinishedStart()
        try:
            yield end
        except (InterruptedRunError, KeyboardInterrupt) as error:
            self._append(What.END, how="interrupted", reason=str(error) or None)
            raise
        except BaseException as error:
            self._append(What.END, how="failed", reason=str(error) or type(error).__name__)
            raise
        self._append(What.END, how="finished", reason=end.reason)

    def memory(self, pss_bytes: int) -> None:
        """Write the host memory of all processes of the run, in which each shared page counts once."""
        self._append(What.MEMORY, pss_bytes=pss_bytes)

    def died(self, process: str, step: int) -> None:
        """Write that a process died when `step` updates were made."""
        self._append(What.DIED, process=process, step=step)

    def replaced(self, process: str, step: int, took_s: float) -> None:
        self._append(What.REPLACED, process=process, step=step, took_s=took_s)

    def _append(self, what: What, **values: Any) -> None:
        row = {"what": what.value, "unix_s": self._clock(), **values}
        try:
            append_row(self._file, row)
        except OSError as error:
            log.warning("%s: %s is not written there", self._file, row, exc_info=error)


def read_history(run_dir: Path) -> Sequence[Mapping[str, Any]]:
    """Return the rows in their order. Empty for a run of a version that wrote none."""
    try:
        text = read_damaged(run_dir / HISTORY_NAME)
    except OSError:
        return ()
    return [{key: value for key, value in row.items() if _is_sound(key, value)} for row in parse_rows(text, _is_row)]


def _is_row(row: Mapping[str, Any]) -> bool:
    return row.get("what") in [what.value for what in What] and _is_moment(row.get("unix_s"))


def _is_sound(key: str, value: Any) -> bool:
    """Return whether a value is of the type that versions write, so that a damaged file can still be shown."""
    if key in ("step", "steps", "pid"):
        return type(value) is int and 0 <= value < LATEST_S
    if key in ("took_s", "pss_bytes"):
        return isinstance(value, (int, float)) and 0 <= value < LARGEST
    if key in ("process", "host", "plan_sha256", "how"):
        return isinstance(value, str)
    if key == "changed":
        return isinstance(value, Mapping) and all(isinstance(pair, list) for pair in value.values())
    is_flat = isinstance(value, Mapping) and not any(isinstance(part, (list, dict)) for part in value.values())
    return key not in ("hardware", "versions") or is_flat


def _is_moment(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < LATEST_S


def newest_start(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the rows from the newest start on; empty if there is none."""
    begins = [k for k, row in enumerate(rows) if row["what"] == What.START.value]
    return rows[begins[-1] :] if begins else ()
