"""Posts: what actors of a run fill one after the other, what passes from each to the next, and what they answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from megatrain_ray.engine.deadlines import DEADLINE_S
from megatrain_ray.errors import DeadlineError, LostPeerError, MegatrainError
from megatrain_ray.io.arena_holder import ArenaHolder, Handles

CHECK_S = 1.0  # how often somebody who waits for an actor asks whether it can still begin
DEATH_TOLD_S = 10.0  # a guess: in which Ray tells that a process has ended
AGAIN = "the same command starts again from the last save"

Task = Callable[[Any], Any]  # from an actor to its answer to come


@dataclass
class Post:
    """What one replaceable actor of a host after the other fills. `task`: what the present one is doing, `call` its
    answer."""

    name: str
    host: int
    take: Callable[[], Any]  # an actor that waits for `take_up`
    arguments: Callable[[Sequence[Handles], int | None], tuple[Any, ...]]  # from holders and the pid of whom it follows
    actor: Any = None
    begun: Any = None  # when the actor has taken up
    handles: Handles = field(default_factory=dict)
    task: Task | None = None
    call: Any = None
    serves: bool = False  # the task ends only when the actor is told to stop

    def fill(self, holders: Sequence[Handles], after_pid: int | None) -> None:
        """Puts another actor in, without waiting for it."""
        self.actor = self.take()
        self.begun = self.actor.take_up.remote(*self.arguments(holders, after_pid))

    @property
    def pid(self) -> int | None:
        return next((handle.pid for handle in self.handles.values()), None)


def actor_id(actor: Any) -> str:
    """As Ray's errors tell of an actor that died."""
    return str(actor._actor_id.hex())


def answer(late: str, call: Any, timeout_s: float = DEADLINE_S) -> Any:
    """What a call that takes no time returns. Raises what it raised, DeadlineError that begins with `late`."""
    try:
        return ray.get(call, timeout=timeout_s)
    except GetTimeoutError:
        raise _late(late, timeout_s) from None


def _late(late: str, timeout_s: float) -> DeadlineError:
    return DeadlineError(f"{late} within {timeout_s:.0f} s; {AGAIN}")


def await_answer(late: str, call: Any, check: Callable[[], None]) -> Any:
    """As `answer`, of one that may never begin: `check` raises where it cannot any more."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not ray.wait([call], timeout=CHECK_S)[0]:
        check()
        if time.monotonic() > deadline_s:
            raise _late(late, DEADLINE_S)
    return ray.get(call)


def await_begin(name: str, begun: Any, check: Callable[[], None]) -> None:
    """Until an actor has taken up. Raises RayActorError where it died, MegatrainError where it cannot, and what `check`
    does, which is asked meanwhile."""
    try:
        await_answer(f"{name} did not start", begun, check)
    except RayTaskError as error:
        check()  # what it needs is not where it was
        if isinstance(error.cause, MegatrainError):
            raise
        raise MegatrainError(could_not_start(name, error)) from error


def result_or_cause(call: Any, others: Sequence[Any]) -> Any:
    """What a call that has ended returned. Raises what it raised; but for a LostPeerError the death of an actor of
    `others`, where Ray tells of one within DEATH_TOLD_S: that is the cause. `others`: calls that are still open."""
    try:
        return ray.get(call)
    except RayTaskError as error:
        if isinstance(error.cause, LostPeerError) and (death := _death_among(others)):
            raise death from error
        raise


def _death_among(calls: Sequence[Any]) -> RayActorError | None:
    """The first that Ray tells of within DEATH_TOLD_S; None where there is none, which takes as long where calls stay
    open."""
    waiting, deadline_s = list(calls), time.monotonic() + DEATH_TOLD_S
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        ended, waiting = ray.wait(waiting, timeout=left_s)
        for call in ended:
            try:
                ray.get(call)
            except RayActorError as death:
                return death
            except RayError:  # a rank that lost it, too
                continue
    return None


def could_not_start(name: str, error: RayError) -> str:
    return f"a process of the run ({name}) could not start: {str(error).strip().splitlines()[-1]}"


@contextmanager
def held(handles: Handles) -> Iterator[Handles]:
    """The same arenas, held by this process too for the block; none where their holder is on another machine."""
    try:
        holder = ArenaHolder.adopt([handles])
    except MegatrainError:
        holder = ArenaHolder({})
    with closing(holder):
        yield holder.handles
