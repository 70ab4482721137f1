"""Posts: what actors of a run fill one after the other, what passes from each to the next, and what they answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.errors import DeadlineError, LostPeerError, MegatrainError
from megatrain_ray.io.arenas.arena_holder import ArenaHolder, Handles

CHECK_S = 1.0  # how often somebody who waits asks whether that can still come
ANSWER_S = 30.0  # for what an actor answers at once
CLOSE_S = 10.0  # for a thread of the driver whose calls have failed, since the actors are dead
DEATH_TOLD_S = 10.0  # a guess: in which Ray tells that a process has ended
AGAIN = "the same command starts again from the last save"

Task = Callable[[Any], Any]  # from an actor to its answer to come
Check = Callable[[], None]  # raises where what is waited for cannot come any more


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


def answer(late: str, call: Any, check: Check, timeout_s: float = DEADLINE_S) -> Any:
    """Return what a call of Ray returns, and wait for it at most `timeout_s`.

    `check` is called every CHECK_S while waiting, and when the call fails: an actor also dies when a process of Ray's
    does, and then that is the cause. Raises what `check` raises, what the call raised, and DeadlineError, whose message
    begins with `late`.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return ray.get(call, timeout=max(0.0, min(CHECK_S, deadline_s - time.monotonic())))
        except GetTimeoutError:
            check()
            if time.monotonic() >= deadline_s:
                raise DeadlineError(f"{late} within {timeout_s:.0f} s; {AGAIN}") from None
        except RayError:
            check()
            raise


def ended(call: Any, check: Check) -> Any:
    """Return what a call that has ended returned, as `answer`: a large result is still to be fetched."""
    return answer("a result did not arrive", call, check)


def await_thread(thread: threading.Thread, check: Check, timeout_s: float) -> None:
    """Wait until a thread has ended, at most `timeout_s`. Raises what `check` raises, which is called every CHECK_S."""
    deadline_s = time.monotonic() + timeout_s
    while thread.is_alive() and (left_s := deadline_s - time.monotonic()) > 0:
        check()
        thread.join(min(CHECK_S, left_s))


def await_begin(name: str, begun: Any, check: Check) -> None:
    """Wait until an actor has taken up. Raises RayActorError where it died, MegatrainError where it cannot, and what
    `check` raises, as `answer`."""
    try:
        answer(f"{name} did not start", begun, check)
    except RayTaskError as error:
        if isinstance(error.cause, MegatrainError):
            raise
        raise MegatrainError(could_not_start(name, error)) from error


def result_or_cause(call: Any, others: Sequence[Any], check: Check) -> Any:
    """What a call that has ended returned. Raises what it raised; but for a LostPeerError the death of an actor of
    `others`, where Ray tells of one within DEATH_TOLD_S: that is the cause. `others`: calls that are still open.
    `check`: as of `answer`."""
    try:
        return ended(call, check)
    except RayTaskError as error:
        if isinstance(error.cause, LostPeerError) and (death := _death_among(others)):
            raise death from error
        raise


def _death_among(calls: Sequence[Any]) -> RayActorError | None:
    """The first that Ray tells of within DEATH_TOLD_S; None where there is none, which takes as long where calls stay
    open."""
    waiting, deadline_s = list(calls), time.monotonic() + DEATH_TOLD_S
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        done, waiting = ray.wait(waiting, timeout=left_s)
        for call in done:
            try:
                ray.get(call, timeout=CHECK_S)
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
