"""Defines named phases of a run by what must be seen of it for a process to be in that phase.

Each look is made while the process is stopped, so what it sees is where the kill comes. `near` is a cheaper look at the
running process: it says when stopping is worth it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kill_campaign.live_run import WORDS, LiveRun, Moment, SaveSight
from benchmarks.kill_campaign.processes import Actor, arenas, shard_number, stack, title

Look = Callable[[LiveRun, int], str | None]  # arguments: the run, and the pid of the process that is to be killed


@dataclass(frozen=True)
class Phase:
    """Describes a phase by the looks that recognise it.

    look: returns what is seen, or None if the run is not in this phase.
    early: it may come before training begins.
    wait_s: seconds to let pass before the first look.
    pause_s: seconds between two looks.
    """

    name: str
    look: Look
    near: Look
    early: bool = False
    wait_s: float = 0.0
    pause_s: float = 0.0002


def by_words(name: str, holds: Callable[[Moment], bool]) -> Phase:
    def look(run: LiveRun, pid: int) -> str | None:
        moment = run.moment()
        return str(moment) if moment is not None and holds(moment) else None

    return Phase(name, look, look)


def by_saves(name: str, holds: Callable[[SaveSight], bool]) -> Phase:
    def look(run: LiveRun, pid: int) -> str | None:
        sight = run.saves()
        return str(sight) if holds(sight) else None

    return Phase(name, look, look, pause_s=0.0)


def by_title(name: str, title_end: str, of: Actor | None = None, *, early: bool = True) -> Phase:
    """Return the phase in which an actor runs a method, seen in the title that Ray gives its process.

    of: the actor that is looked at, if it is not the one to be killed.
    """

    def look(run: LiveRun, pid: int) -> str | None:
        whose = pid if of is None else run.processes.find(of)
        now = title(whose) if whose else ""
        return now if now.endswith(title_end) else None

    return Phase(name, look, look, early=early, pause_s=0.005)


def attaching(of: Actor | None = None) -> Phase:
    """Return the phase in which a shard has started and not mapped its state yet.

    of: the shard that is looked at, if it is not the one to be killed.
    """

    def look(run: LiveRun, pid: int) -> str | None:
        shard = pid if of is None else run.processes.find(of)
        return f"{title(shard)}; {run.moment()}" if shard and shard_number(shard) is None else None

    return Phase("attaching" if of is None else f"{of} attaching", look, look, early=True, pause_s=0.005)


def before_words(actor: Actor) -> Phase:
    """Return the phase in which the actor is not there yet, or has not mapped the words."""

    def look(run: LiveRun, pid: int) -> str | None:
        there = run.processes.find(actor)
        if there and WORDS in arenas(there, mapped=True):
            return None
        return f"{title(pid)}; {actor}: {title(there) if there else 'not there'}"

    return Phase(f"before the {actor} maps the words", look, look, early=True, pause_s=0.005)


def by_stack(
    name: str, file: str, *functions: str, thread: str = "", early: bool = False, near: Phase | None = None
) -> Phase:
    """Return the phase in which one of the functions is on the stack of a thread.

    thread: what the thread's name begins with; by default any thread.
    near: phase whose cheaper look says when it is worth asking py-spy, which takes its time.
    """

    def look(run: LiveRun, pid: int) -> str | None:
        for frame in stack(pid):
            if frame.file == file and frame.function in functions and frame.thread.startswith(thread):
                return f"{frame.function} in {file}, thread {frame.thread}; {run.moment()}"
        return None

    return Phase(name, look, near.near if near else anything, early=early, pause_s=0.03)


def by_folder(name: str, folder: Path, holds: Callable[[dict[str, int]], bool]) -> Phase:
    """Return the phase in which `holds` accepts the files of a folder, given as sizes by name."""

    def look(run: LiveRun, pid: int) -> str | None:
        try:
            files = {path.name: path.stat().st_size for path in folder.iterdir()}
        except OSError:
            return None
        return str(files) if holds(files) else None

    return Phase(name, look, look, early=True, pause_s=0.0)


def at_random(wait_s: float, *, early: bool = False) -> Phase:
    return Phase(f"at random, {wait_s:.2f} s on", anything, anything, early=early, wait_s=wait_s)


def anything(run: LiveRun, pid: int) -> str | None:
    return f"{title(pid)[:60]}; {run.moment()}; {run.saves()}"
