"""Finds the state of a run: whether it is active or how it ended, progress, remaining time, failures and free space."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.progress import RECENT_STEPS
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_history import newest_start, read_history
from megatrain_ray.run.run_lock import lock_holder
from megatrain_ray.run.run_processes import PROCESSES_NAME
from megatrain_ray.units import format_bytes, format_duration

MANY_STEPS = 10  # times of a step without a new row after which an active run is called quiet
SHOWN_FAULTS = 5


class State(Enum):
    """Says whether a run is active, or how it ended.

    STARTING: active, but this start has not made a step yet.
    DIED: the driver was killed, or its machine went down.
    ENDED: ended in an unknown way, by a version that wrote no history.
    """

    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    DIED = "died"
    ENDED = "ended"


@dataclass(frozen=True)
class Fault:
    """Describes the death of a process.

    unix_s: time of the death, seconds since 1970.
    step: updates made by then.
    took_s: seconds until it was replaced; None if it was not.
    """

    process: str
    unix_s: float
    step: int
    took_s: float | None

    def __str__(self) -> str:
        after = f"replaced in {self.took_s:.1f} s" if self.took_s is not None else "not replaced"
        return f"{self.process} died after step {self.step}, {after}"


@dataclass(frozen=True)
class RunState:
    """Describes the state of a run.

    epoch: passes over the data; None before the first step and in runs of earlier releases.
    reason: why it ended; None if that is not known.
    holder: process and machine of the driver of an active run.
    age_s: seconds since the newest row; None without one.
    step_s: median seconds of recent steps.
    faults: deaths of processes, of all starts.
    free_bytes: free space by name of the folder.
    """

    state: State
    step: int
    steps: int
    num_starts: int = 1
    epoch: float | None = None
    reason: str | None = None
    holder: str | None = None
    age_s: float | None = None
    step_s: float | None = None
    faults: tuple[Fault, ...] = ()
    free_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def left_s(self) -> float | None:
        """Return the remaining seconds, estimated from recent steps; None if the run is not active or has no step."""
        if self.step_s is None or self.state not in (State.STARTING, State.RUNNING):
            return None
        return (self.steps - self.step) * self.step_s

    @property
    def is_quiet(self) -> bool:
        """Return whether an active run has made no step for much longer than one takes."""
        is_known = self.state is State.RUNNING and self.age_s is not None and self.step_s is not None
        return is_known and (self.age_s or 0.0) > MANY_STEPS * max(1.0, self.step_s or 0.0)

    def lines(self) -> Iterator[str]:
        """Yield the state as lines of text."""
        by = f", process {self.holder}" if self.holder else ""
        reason = (self.reason or "").removeprefix(f"{self.state.value} ")  # as `interrupted after step 30`
        joined = " " if reason != (self.reason or "") else ": "
        yield f"{self.state.value}{by}{f'{joined}{reason}' if reason else ''}"
        age = f", {format_duration(self.age_s)} ago" if self.age_s is not None else ""
        epoch = f", epoch {self.epoch:.3g}" if self.epoch is not None else ""
        yield f"step {self.step} of {self.steps}{epoch}{age}"
        if self.is_quiet:
            yield f"quiet: a step takes {self.step_s:.3g} s; a save or an evaluation, or it hangs: see logs/driver.log"
        if self.left_s is not None:
            yield f"about {format_duration(self.left_s)} left, at {self.step_s:.3g} s a step"
        yield from self._faults()
        for folder, free_bytes in self.free_bytes.items():
            yield f"{format_bytes(free_bytes)} free on the disk of {folder}"

    def _faults(self) -> Iterator[str]:
        starts = f" in {self.num_starts} starts" if self.num_starts > 1 else ""
        if not self.faults:
            yield f"no process died{starts}"
            return
        yield f"deaths of processes: {len(self.faults)}{starts}; the last ones:"
        yield from (f"  {fault}" for fault in self.faults[-SHOWN_FAULTS:])


def read_state(
    files: RunFiles, config: TrainConfig, rows: Sequence[Mapping[str, Any]], now_s: float | None = None
) -> RunState:
    """Read the state of a run.

    rows: rows of metrics.jsonl.
    now_s: current time, seconds since 1970; None: ask the clock.
    """
    now_s = time.time() if now_s is None else now_s
    history = read_history(files.path)
    holder, step, steps = lock_holder(files.path), rows[-1]["step"] if rows else 0, config.train.num_steps
    state, reason = _state(files, newest_start(history), holder, step, steps)
    recent = [row["step_s"] for row in rows[-RECENT_STEPS:] if isinstance(row.get("step_s"), (int, float))]
    return RunState(
        state=state,
        step=step,
        steps=steps,
        num_starts=max(1, sum(row["what"] == "start" for row in history)),
        epoch=rows[-1].get("epoch") if rows else None,
        reason=reason,
        holder=holder,
        age_s=max(0.0, now_s - files.metrics_file.stat().st_mtime) if rows else None,
        step_s=statistics.median(recent) if recent else None,
        faults=tuple(_faults(history)),
        free_bytes=_free(files.path, config),
    )


def _state(
    files: RunFiles, start: Sequence[Mapping[str, Any]], holder: str | None, step: int, steps: int
) -> tuple[State, str | None]:
    has_ended = bool(start) and start[-1]["what"] == "end"
    # The driver holds the lock briefly after it has written the end.
    is_active = holder is not None and not (has_ended and holder.split()[0] == str(start[0].get("pid")))
    if is_active:
        is_new = bool(start) and step <= start[0].get("step", 0)
        return (State.STARTING if is_new or not step or has_ended else State.RUNNING), None
    if has_ended:
        known = [state for state in State if state.value == start[-1].get("how")]
        return (known or [State.ENDED])[0], start[-1].get("reason")
    if start or (files.path / PROCESSES_NAME).exists():
        return State.DIED, "killed, or its machine went down: nothing was written down; the same command resumes"
    return (State.FINISHED if step >= steps else State.ENDED), None


def _faults(history: Sequence[Mapping[str, Any]]) -> Iterator[Fault]:
    """Yield each death, with the next replacement of the same process if that came before another death or start."""
    for k, row in enumerate(history):
        if row["what"] != "died":
            continue
        later = (x for x in history[k + 1 :] if x["what"] == "start" or x.get("process") == row.get("process"))
        then = next(later, {})
        took_s = then.get("took_s") if then.get("what") == "replaced" else None
        yield Fault(str(row.get("process")), row["unix_s"], row.get("step", 0), took_s)


def _free(run_dir: Path, config: TrainConfig) -> dict[str, int]:
    """Return the free space of the run directory, and of spill.path if that is on another disk."""
    folders = [run_dir, *([Path(config.spill.path)] if config.spill.path is not None else [])]
    free, devices = {}, set()
    for name, folder in zip(("run_dir", "spill.path"), folders, strict=False):
        with suppress(OSError):
            device = folder.stat().st_dev
            if device not in devices:
                free[name] = shutil.disk_usage(folder).free
            devices.add(device)
    return free
