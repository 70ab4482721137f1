"""Stops a process, looks at it and kills it in a named phase, and in no other."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.kill_campaign.live_run import LiveRun
from benchmarks.kill_campaign.phases import Phase
from benchmarks.kill_campaign.processes import Actor, Role, go_on, state, stop


@dataclass(frozen=True)
class Blow:
    """Describes one kill: SIGKILL to all `actors` together, when the first is in the phase.

    num_updates: so many more updates must have been committed before.
    """

    actors: tuple[Actor, ...]
    phase: Phase
    num_updates: int = 0


@dataclass(frozen=True)
class Hit:
    """Holds what was killed, and what was seen of it.

    committed: steps of the saves that existed then.
    attempts: how often it was stopped until the phase was met.
    """

    phase: str
    actors: tuple[str, ...]
    pids: tuple[int, ...]
    seen: str
    committed: tuple[int, ...]
    attempts: int
    at_s: float


def strike(run: LiveRun, blow: Blow, timeout_s: float) -> Hit | None:
    """Kill the actors in the phase, and return what was hit.

    Returns None if the phase did not come within `timeout_s`, or the run ended before.
    """
    deadline_s = time.monotonic() + timeout_s
    if not _await_begin(run, blow, deadline_s):
        return None
    not_before_s = time.monotonic() + blow.phase.wait_s
    attempts = 0
    pids: tuple[int, ...] = ()
    while not run.over and time.monotonic() < deadline_s:
        pids = _find(run, blow, pids)
        if not pids or time.monotonic() < not_before_s or blow.phase.near(run, pids[0]) is None:
            time.sleep(blow.phase.pause_s)
            continue
        attempts += 1
        stopped = [stop(pid) for pid in pids]
        seen = blow.phase.look(run, pids[0]) if all(stopped) else None
        if seen is not None:
            run.processes.refresh()
            committed = run.saves().committed
            _kill(pids)
            at_s = round(time.monotonic() - run.start_s, 2)
            return Hit(blow.phase.name, tuple(map(str, blow.actors)), pids, seen, committed, attempts, at_s)
        for pid in pids:
            go_on(pid)
        time.sleep(blow.phase.pause_s)
    return None


def _await_begin(run: LiveRun, blow: Blow, deadline_s: float) -> bool:
    if blow.phase.early:
        return True
    first = None
    while not run.over and time.monotonic() < deadline_s:
        moment = run.moment()
        if moment is not None:
            first = moment.committed if first is None else first
            if moment.committed >= first + blow.num_updates:
                return True
        time.sleep(0.01)
    return False


def _find(run: LiveRun, blow: Blow, before: tuple[int, ...]) -> tuple[int, ...]:
    """Return the processes to kill, or none if one is missing.

    before: the processes found last; they are still right unless one has gone or a shard has got its number.
    """
    changing = Actor(Role.SHARD, None) in blow.actors
    if before and not changing and all(state(pid) not in "ZX" for pid in before):
        return before
    found = tuple(pid for actor in blow.actors if (pid := run.processes.find(actor)) is not None)
    return found if len(found) == len(blow.actors) else ()


def _kill(pids: tuple[int, ...]) -> None:
    """Kill the processes, and return when they are dead."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while any(state(pid) not in "ZX" for pid in pids):
        time.sleep(0.001)
