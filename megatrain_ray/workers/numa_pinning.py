"""Keeps a process on its CPUs: all the threads that it has, and so all that they will start."""

from __future__ import annotations

import os
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from megatrain_ray.units import format_ranges

TASKS = Path("/proc/self/task")


def pin_process(cpus: Set[int]) -> str:
    """Let every thread of this process run on `cpus` only, as far as the kernel allows it.

    Returns what went wrong; empty if nothing did. It never ends a run. A thread inherits its CPUs from the one that
    starts it. sched_setaffinity moves one thread, and a process of Ray has about 20 before any of ours.
    """
    try:
        # Repeat until no thread is left: one that was not moved yet may have started another one meanwhile.
        while left := {thread for thread in _threads() if _elsewhere(thread, cpus)}:
            for thread in left:
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread, cpus)
            if stuck := {thread for thread in left if _elsewhere(thread, cpus)}:
                return f"{len(stuck)} threads do not stay on CPUs {format_ranges(cpus)}: a cpuset has fewer of them"
    except OSError as error:
        return f"threads cannot be kept on CPUs {format_ranges(cpus)}: {error.strerror}"
    return ""


def _threads() -> set[int]:
    return {int(path.name) for path in TASKS.iterdir()}


def _elsewhere(thread: int, cpus: Set[int]) -> bool:
    """Return whether a living thread may run on other CPUs, or not on all of these."""
    try:
        return os.sched_getaffinity(thread) != cpus
    except ProcessLookupError:
        return False
