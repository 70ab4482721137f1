"""What GPU workers are asked, in which order, when others take their places. With actors that note what comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatrain_ray.crew import gpu_worker_group
from megatrain_ray.crew.actor_role import ActorRole, Check
from megatrain_ray.crew.gpu_worker_group import ASK_S, GpuWorkerGroup, PreparedSteps
from megatrain_ray.engine.plan.plan_groups import HostSettings


def test_steps_are_held_back_until_their_data_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(gpu_worker_group.time, "monotonic", lambda: now_s)
    asked: list[str] = []

    def ask(submitted: int) -> str:
        asked.append(f"question {len(asked)}")
        return asked[-1]

    whole, stream = (PreparedSteps(ask, 3, streamed=streamed) for streamed in (False, True))
    assert not whole.holds(1 << 40)
    assert (stream.holds(2), stream.holds(3)) == (False, True)
    assert (stream.calls(2), asked) == ([], []), "nothing is held back"
    assert stream.calls(3) == stream.calls(3) == ["question 0"], "one at a time"
    stream.record_answer(lambda call: 3)
    assert stream.calls(3) == [], "it was asked just now"
    now_s += ASK_S
    assert stream.calls(3) == ["question 1"]
    stream.record_answer(lambda call: 8)
    assert not stream.holds(7)
    now_s += ASK_S
    assert stream.calls(8) == ["question 2"]

    def fails(call: str) -> int:
        raise ValueError(call)

    with pytest.raises(ValueError, match="question 2"):
        stream.record_answer(fails)
    now_s += ASK_S
    assert stream.calls(8) == ["question 3"], "of the process that follows"
    stream.record_answer(lambda call: 5)
    assert not stream.holds(7), "one that has just started knows of fewer"


class Actor:
    """Notes its calls among those of all."""

    def __init__(self, name: str, asked: list[tuple[str, str, Any]]) -> None:
        self._name = name
        self._asked = asked

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments, **named: self._asked.append((self._name, method, named)))


@pytest.fixture
def asked() -> list[tuple[str, str, Any]]:
    return []


@pytest.fixture
def group(asked: list[tuple[str, str, Any]], monkeypatch: pytest.MonkeyPatch) -> GpuWorkerGroup:
    """Return the GPU workers of two hosts with two GPUs each."""
    pids = iter(range(100, 200))

    def wait_ready(role: ActorRole, check: Check) -> None:
        role.pid = next(pids)

    monkeypatch.setattr(gpu_worker_group, "answer", lambda *_: "a place to meet")
    monkeypatch.setattr(ActorRole, "wait_ready", wait_ready)
    place = SimpleNamespace(take=lambda name: Actor(name, asked), addresses=["first", "second"])
    plan = SimpleNamespace(hosts=HostSettings(num_hosts=2, num_gpus=4), repeats_steps=True)
    started = GpuWorkerGroup(SimpleNamespace(plan=plan), place, lambda: None, lambda calls, timeout_s: None)  # type: ignore[arg-type]
    started.start(lambda host: ())
    started.wait_ready()
    return started


def pids_of(group: GpuWorkerGroup) -> list[int | None]:
    return [worker.pid for worker in group.workers]


def test_each_waits_for_the_end_of_all_before_it_on_its_host(
    group: GpuWorkerGroup, asked: list[tuple[str, str, Any]]
) -> None:
    """Whose GPU it gets is up to Ray. The first ones follow nobody."""
    before = pids_of(group)
    group.start(lambda host: ())
    after = [arguments["after_pids"] for _, method, arguments in asked if method == "setup"]
    assert after == [[]] * 4 + [before[:2]] * 2 + [before[2:]] * 2


def test_who_follows_is_known_before_it_builds(group: GpuWorkerGroup, asked: list[tuple[str, str, Any]]) -> None:
    """So the end of one that is cut short while it does is waited for."""
    before = pids_of(group)
    known: list[list[int | None]] = []

    def ready() -> None:
        assert all(method != "build" for _, method, _ in asked)
        known.append(pids_of(group))

    group.replace_gpus(lambda host: (), lambda: None, ready)  # type: ignore[arg-type, return-value]
    assert [method for _, method, _ in asked].count("build") == 4
    assert known == [pids_of(group)]
    assert not set(known[0]) & set(before)
