"""How the driver waits for what others do: with a bound, and with a look at those without whom it cannot come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from megatrain_ray.crew import actor_role
from megatrain_ray.crew.actor_role import CHECK_S, ActorRole, answer, await_thread
from megatrain_ray.crew.recovery import ProcessKind
from megatrain_ray.errors import DeadlineError, MegatrainError


class Clock:
    """Time that passes only while somebody waits for an answer, which comes at `at_s`."""

    def __init__(self, at_s: float, raises: Exception | None = None) -> None:
        self.now_s = 0.0
        self.num_checks = 0
        self._at_s = at_s
        self._raises = raises

    def monotonic(self) -> float:
        return self.now_s

    def get(self, call: Any, timeout: float) -> Any:
        if self.now_s + timeout < self._at_s:
            self.now_s += timeout
            raise GetTimeoutError
        self.now_s = max(self.now_s, self._at_s)
        if self._raises:
            raise self._raises
        return call

    def check(self) -> None:
        self.num_checks += 1

    def dead(self) -> None:
        raise MegatrainError("a process of Ray's died")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    def start(at_s: float, raises: Exception | None = None) -> Clock:
        started = Clock(at_s, raises)
        monkeypatch.setattr(actor_role.time, "monotonic", started.monotonic)
        monkeypatch.setattr(actor_role.ray, "get", started.get)
        return started

    return start


def test_an_answer_is_waited_for_with_looks_at_who_must_live(clock: Callable[..., Clock]) -> None:
    of = clock(3.5)
    assert answer("it did not come", "the answer", of.check) == "the answer"
    assert (of.now_s, of.num_checks) == (3.5, 3)


def test_it_is_waited_for_no_longer_than_the_bound(clock: Callable[..., Clock]) -> None:
    of = clock(1e9)
    with pytest.raises(DeadlineError, match=r"^it did not come within 7 s; the same command"):
        answer("it did not come", "the answer", of.check, 7.0)
    assert (of.now_s, of.num_checks) == (7.0, 7)


def test_it_is_waited_for_no_longer_when_ray_has_died(clock: Callable[..., Clock]) -> None:
    of = clock(1e9)
    with pytest.raises(MegatrainError, match="Ray's died"):
        answer("it did not come", "the answer", of.dead)
    assert of.now_s == CHECK_S


def ready(title: str, call: Any, check: Callable[[], None]) -> None:
    ActorRole(ProcessKind.GPU, title, 0, lambda _: None, lambda _: {}, ready=call).wait_ready(check)


@pytest.mark.parametrize("wait", [answer, ready])
def test_an_actor_that_died_with_ray_is_not_the_cause(clock: Callable[..., Clock], wait: Callable[..., Any]) -> None:
    """All actors die with Ray's raylet. Taken for the death of one, it would be replaced on a raylet that is gone."""
    of = clock(0.5, RayActorError())
    with pytest.raises(MegatrainError, match="Ray's died"):
        wait("it did not come", "the answer", of.dead)
    with pytest.raises(RayActorError):
        wait("it did not come", "the answer", of.check)


def test_a_thread_is_waited_for_no_longer_when_ray_has_died() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        with pytest.raises(MegatrainError, match="Ray's died"):
            await_thread(thread, Clock(0.0).dead, 100.0)
        await_thread(thread, Clock(0.0).check, 0.0)
        assert thread.is_alive()
    finally:
        release.set()
    await_thread(thread, Clock(0.0).check, 100.0)
    assert not thread.is_alive()
