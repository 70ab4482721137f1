"""Defines ActorRole, a role in a run that one actor fills at a time, and bounded waits for the answers of actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from megatrain_ray.crew.recovery import ProcessKind, describe_death
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.errors import DeadlineError, LostPeerError, MegatrainError
from megatrain_ray.io.arenas.arena_holder import ArenaHolder, Handles

CHECK_S = 1.0  # seconds between two calls of `check` during a wait
CLOSE_S = 10.0  # bound, in seconds, for a thread of the driver whose calls have failed, since the actors are dead
DEATH_TOLD_S = 10.0  # a guess: seconds within which Ray reports that a process has died
AGAIN = "the same command starts again from the last save"

TITLES = {ProcessKind.DATA: "the data process", ProcessKind.GPU: "the {}"}  # in messages about a start

Task = Callable[[Any], Any]  # calls a method of an actor and returns the pending call
Check = Callable[[], None]  # raises an error if what is waited for cannot come any more


@dataclass(eq=False)
class ActorRole:
    """Tracks a role in the run (for example optimizer shard 1): its current actor, and how to start a replacement."""

    kind: ProcessKind
    name: str
    host: int  # number of the host that the actor runs on
    take: Callable[[str], Any]  # returns an actor of a name, which waits for the call of `setup`
    # Returns the arguments of `setup`, from the handles of the processes that hold the arenas of the host.
    arguments: Callable[[Sequence[Handles]], Mapping[str, Any]]
    actor: Any = None
    ready: Any = None  # pending call of `setup`, which returns the process id
    pid: int | None = None  # of the newest actor that was ready
    handles: Handles = field(default_factory=dict)  # what that actor holds of the arenas
    task: Task | None = None  # what the actor is doing; it is called again on a replacement
    call: Any = None  # pending call of `task`
    serves: bool = False  # the task ends only when the actor is told to stop

    def start(self, holders: Sequence[Handles]) -> None:
        """Start an actor in this role and call its `setup`, without waiting for it."""
        self.actor = self.take(self.name)
        self.setup(holders)

    def setup(self, holders: Sequence[Handles]) -> None:
        self.ready = self.actor.setup.remote(**self.arguments(holders))

    def wait_ready(self, check: Check) -> None:
        """Wait until the actor's `setup` has returned, and note its process and what it holds.

        Raises RayActorError if the actor died, MegatrainError if it could not start, and what `check` raises, as
        `answer` does.
        """
        title = TITLES.get(self.kind, "{}").format(self.name)
        try:
            self.pid = answer(f"{title} did not start", self.ready, check)
        except RayTaskError as error:
            if isinstance(error.cause, MegatrainError):
                raise
            raise MegatrainError(describe_death(title, str(error), could_not_start=True)) from error
        if self.kind is not ProcessKind.DATA:
            self.handles = answer(f"{title} did not start", self.actor.handles.remote(), check)

    def assign(self, task: Task, *, serves: bool) -> None:
        """Let the actor begin a task."""
        self.task, self.serves = task, serves
        self.call = task(self.actor)


def actor_id(actor: Any) -> str:
    """Return the id by which Ray's errors name an actor that died."""
    return str(actor._actor_id.hex())


def ask_each(roles: Iterable[ActorRole], method: str, *arguments: Any) -> list[Any]:
    """Call a method of the actor of each role, and return the pending calls."""
    return [getattr(role.actor, method).remote(*arguments) for role in roles]


def answer(late: str, call: Any, check: Check, timeout_s: float = DEADLINE_S) -> Any:
    """Return the result of a Ray call, and wait for it at most `timeout_s` seconds.

    `check` is called every CHECK_S seconds while waiting, and when the call fails. An actor also dies when one of Ray's
    own processes does; then that is the cause, and `check` raises it. Raises what `check` raises, what the call raised,
    and DeadlineError, whose message begins with `late`.
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


def ask_all(roles: Sequence[ActorRole], check: Check, method: str, *arguments: Any) -> list[Any]:
    """Call a method of the actor of each role, and return the results. Waits for each as `answer` does."""
    calls = ask_each(roles, method, *arguments)
    return [answer(f"{role.name} did not answer", call, check) for role, call in zip(roles, calls, strict=True)]


def ended(call: Any, check: Check) -> Any:
    """Return the result of a call that has ended, as `answer` does. A large result must still be fetched."""
    return answer("a result did not arrive", call, check)


def await_thread(thread: threading.Thread, check: Check, timeout_s: float) -> None:
    """Wait until a thread has ended, at most `timeout_s` seconds.

    Calls `check` every CHECK_S seconds and raises what it raises. Returns without an error when the time is over.
    """
    deadline_s = time.monotonic() + timeout_s
    while thread.is_alive() and (left_s := deadline_s - time.monotonic()) > 0:
        check()
        thread.join(min(CHECK_S, left_s))


def result_or_cause(call: Any, others: Sequence[Any], check: Check) -> Any:
    """Return the result of a call that has ended; if a peer's death made it fail, raise that death.

    Raises what the call raised. If that is a LostPeerError, and Ray reports within DEATH_TOLD_S seconds that an actor
    of `others`, the calls that are still open, died, raises the RayActorError of that death instead: it is the cause.
    """
    try:
        return ended(call, check)
    except RayTaskError as error:
        if isinstance(error.cause, LostPeerError) and (death := _death_among(others)):
            raise death from error
        raise


def _death_among(calls: Sequence[Any]) -> RayActorError | None:
    """Return the first death of an actor that Ray reports within DEATH_TOLD_S seconds, or None.

    If there is none and calls stay open, this takes the full time.
    """
    waiting, deadline_s = list(calls), time.monotonic() + DEATH_TOLD_S
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        done, waiting = ray.wait(waiting, timeout=left_s)
        for call in done:
            try:
                ray.get(call, timeout=CHECK_S)
            except RayActorError as death:
                return death
            except RayError:  # from a rank that also lost its peer
                continue
    return None


@contextmanager
def hold_arenas(handles: Handles) -> Iterator[Handles]:
    """Hold the same arenas in this process for the block. Yields no handles if their holder is on another machine."""
    try:
        holder = ArenaHolder.adopt([handles])
    except MegatrainError:
        holder = ArenaHolder({})
    with closing(holder):
        yield holder.handles
