"""What GPU workers are asked, in which order, when others take their places. With actors that note what comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatrain_ray.crew import gpu_worker_group
from megatrain_ray.crew.gpu_worker_group import GpuSide
from megatrain_ray.engine.plan.plan_groups import HostSettings
from megatrain_ray.run.process_names import gpu_name


class Actor:
    """Notes its calls among those of all."""

    def __init__(self, name: str, asked: list[tuple[str, str, Any]]) -> None:
        self._name = name
        self._asked = asked

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments, **_: self._asked.append((self._name, method, arguments)))


@pytest.fixture
def asked() -> list[tuple[str, str, Any]]:
    return []


@pytest.fixture
def side(asked: list[tuple[str, str, Any]], monkeypatch: pytest.MonkeyPatch) -> GpuSide:
    """Return the GPU workers of two hosts with two GPUs each."""
    handles = iter(range(100, 200))
    monkeypatch.setattr(gpu_worker_group, "await_begin", lambda *_: None)
    monkeypatch.setattr(gpu_worker_group, "answer", lambda *_: {"arena": SimpleNamespace(pid=next(handles))})
    monkeypatch.setattr(gpu_worker_group.ray, "kill", lambda _: None)
    place = SimpleNamespace(take=lambda name: Actor(name, asked), addresses=["first", "second"])
    plan = SimpleNamespace(hosts=HostSettings(num_hosts=2, num_gpus=4), repeats_steps=True)
    return GpuSide(SimpleNamespace(plan=plan), place, dict, lambda: None)


def test_each_waits_for_the_end_of_all_before_it_on_its_host(side: GpuSide, asked: list[tuple[str, str, Any]]) -> None:
    """Whose GPU it gets is up to Ray. The first ones follow nobody."""
    side.introduce(side.take_gpus(lambda host: ()))
    before = [side.pids[gpu_name(rank)] for rank in range(4)]
    side.take_gpus(lambda host: ())
    after = [arguments[3] for _, method, arguments in asked if method == "take_up" and arguments]
    assert after == [[]] * 4 + [before[:2]] * 2 + [before[2:]] * 2


def test_who_follows_is_known_before_it_builds(side: GpuSide, asked: list[tuple[str, str, Any]]) -> None:
    """So the end of one that is cut short while it does is waited for."""
    side.introduce(side.take_gpus(lambda host: ()))
    before = dict(side.pids)
    known: list[dict[str, int]] = []

    def begun() -> None:
        assert all(method != "build" for _, method, _ in asked)
        known.append(dict(side.pids))

    side.replace_gpus(lambda host: (), lambda: None, lambda calls, timeout_s: None, begun)
    assert [method for _, method, _ in asked].count("build") == 4
    assert known == [side.pids]
    assert all(known[0][gpu_name(rank)] != before[gpu_name(rank)] for rank in range(4))
