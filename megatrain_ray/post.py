"""Posts: what actors of a run fill one after the other, and what passes from each to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.arena_holder import ArenaHolder, Handles

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


@contextmanager
def held(handles: Handles) -> Iterator[Handles]:
    """The same arenas, held by this process too for the block; none where their holder is on another machine."""
    try:
        holder = ArenaHolder.adopt([handles])
    except MegatrainError:
        holder = ArenaHolder({})
    with closing(holder):
        yield holder.handles
