"""Posts: what actors of a run fill one after the other, what passes from each to the next, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from megatrain_ray.engine.deadlines import DEADLINE_S
from megatrain_ray.errors import DeadlineError, MegatrainError
from megatrain_ray.io.arena_holder import ArenaHolder, Handles

AGAIN = "the same command starts again from the last save"

Task = Callable[[Any], Any]  # from an actor to its answer to come


@dataclass
class Post:
    """What one replaceable actor after the other fills. `task`: what the present one is doing, `call` its answer."""

    name: str
    make: Callable[[Sequence[Handles], int | None], Any]  # from holders and the pid of whom it follows
    actor: Any = None
    handles: Handles = field(default_factory=dict)
    task: Task | None = None
    call: Any = None
    serves: bool = False  # the task ends only when the actor is told to stop

    @property
    def pid(self) -> int | None:
        return next((handle.pid for handle in self.handles.values()), None)


def answer(late: str, call: Any, timeout_s: float = DEADLINE_S) -> Any:
    """What a call that takes no time returns. Raises what it raised, DeadlineError that begins with `late`."""
    try:
        return ray.get(call, timeout=timeout_s)
    except GetTimeoutError:
        raise DeadlineError(f"{late} within {timeout_s:.0f} s; {AGAIN}") from None


@contextmanager
def held(handles: Handles) -> Iterator[Handles]:
    """The same arenas, held by this process too for the block; none where their holder is on another machine."""
    try:
        holder = ArenaHolder.adopt([handles])
    except MegatrainError:
        holder = ArenaHolder({})
    with closing(holder):
        yield holder.handles
