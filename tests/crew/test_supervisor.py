"""Carrying out what recovery.py decides, with actors that note their calls, and without Ray."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from megatrain_ray.crew import actor_role, supervisor
from megatrain_ray.crew.recovery import FailureBudget
from megatrain_ray.crew.supervisor import Supervisor
from megatrain_ray.engine.plan.plan_groups import HostSettings
from megatrain_ray.errors import LostDeviceError, LostProcessError, MegatrainError
from megatrain_ray.workers.messages import Progress


class Actor:
    """Notes the names of its calls. A call is a function of its result, or raises the death of the actor."""

    def __init__(self, name: str, number: int, dies_in: str = "") -> None:
        self.name = name
        self.asked: list[str] = []
        self.is_killed = False
        self._actor_id = SimpleNamespace(hex=lambda: f"{name} {number}")
        self._results = {"setup": number, "handles": {"words": SimpleNamespace(pid=number)}}
        self._dies_in = dies_in

    def __getattr__(self, method: str) -> Any:
        def remote(*_: Any, **named: Any) -> Callable[[], Any]:
            self.asked.append(method)

            def result() -> Any:
                if method == self._dies_in:
                    raise death_of(self)
                return self._results.get(method)

            return result

        return SimpleNamespace(remote=remote)


def death_of(actor: Any) -> RayActorError:
    return RayActorError(actor_id=actor._actor_id.hex(), error_msg="it was killed")


class Placement:
    """Gives out actors. The first of those that replace an actor may die as well."""

    addresses: tuple[str, ...] = ("here",)

    def __init__(self) -> None:
        self.taken: list[Actor] = []
        self.dying = ""  # method in which the next actor dies
        self.lost_hosts = ""
        self._numbers = count(100)

    def take(self, name: str) -> Actor:
        actor = Actor(name, next(self._numbers), self.dying)
        self.dying = ""
        self.taken.append(actor)
        return actor

    def node_of(self, host: int) -> str:
        return f"node {host}"

    def check_hosts(self) -> None:
        if self.lost_hosts:
            raise LostProcessError(self.lost_hosts)


class Run(Supervisor):
    """A supervisor whose actors are up, with what it reported."""

    def __init__(self, place: Placement, *, repeats_steps: bool = True) -> None:
        plan = SimpleNamespace(
            hosts=HostSettings(num_hosts=1, num_gpus=1),
            shards=SimpleNamespace(num_shards=2),
            num_parts=3,
            repeats_steps=repeats_steps,
        )
        run_spec = SimpleNamespace(plan=plan, config=SimpleNamespace(max_failures=2))
        self.deaths: list[str] = []
        self.replaced: list[str] = []
        faults = SimpleNamespace(died=self.deaths.append, replaced=lambda name, _: self.replaced.append(name))
        self.budget = FailureBudget(2)
        super().__init__(run_spec, placement=place, failures=self.budget, faults=faults)  # type: ignore[arg-type]
        self.group.data_arguments = {}
        for role in self._owners:
            role.arguments = lambda holders: {"holders": holders}
        for role in self._roles:
            role.start(())
            role.wait_ready(self.check)
            role.assign(lambda actor: actor.run.remote(), serves=True)
        self._progress = lambda: Progress(4, 4)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Placement:
    def kill(actor: Actor) -> None:
        actor.is_killed = True

    def wait(calls: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return calls[:1], calls[1:]

    monkeypatch.setattr(supervisor, "ray", SimpleNamespace(kill=kill, wait=wait))
    monkeypatch.setattr(actor_role, "ray", SimpleNamespace(get=lambda call, timeout: call(), wait=wait))
    return Placement()


def test_a_shard_that_died_is_replaced_and_has_its_task_again(place: Placement) -> None:
    run = Run(place)
    _, died, *_ = place.taken
    assert died.name == "optimizer shard 0"
    before = run.pids
    run.recover(death_of(died))
    *_, replacement = place.taken
    assert replacement.name == died.name
    assert replacement.asked == ["setup", "handles", "run"]
    assert died.is_killed
    assert {name for name, pid in run.pids.items() if before[name] != pid} == {died.name}
    assert run.deaths == run.replaced == [died.name]
    run.recover(death_of(died))
    assert place.taken[-1] is replacement, "a death that is told of once more is made good already"
    assert run.budget.count == 1


def test_a_replacement_that_dies_is_replaced(place: Placement) -> None:
    run = Run(place)
    place.dying = "handles"
    run.recover(death_of(place.taken[0]))
    second, third = place.taken[-2:]
    assert (second.asked, third.asked) == (["setup", "handles"], ["setup", "handles", "run"])
    assert run.budget.count == 2
    assert run.deaths == ["arena owner"] * 2
    assert run.replaced == ["arena owner"]
    with pytest.raises(MegatrainError, match=r"^arena owner died, the run's failure number 3 \(max_failures: 2\)"):
        run.recover(death_of(third))


@pytest.mark.parametrize("fails_by", ["death", "device"])
def test_gpu_workers_resume_where_training_stands(
    place: Placement, fails_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(place)
    gpu = run.group.gpu
    device_lost = RayTaskError("step", "a traceback", LostDeviceError("an illegal access"), "", 1, "here")
    monkeypatch.setattr(run, "wait", lambda calls, timeout_s: calls)
    run.recover(death_of(gpu) if fails_by == "death" else device_lost, gpu)
    assert run.group.gpu is not gpu
    assert run.group.gpu.asked == ["setup", "handles", "fill", "build", "resume", "until_data_dies"]
    assert run.replaced == ["GPU worker"]
    replacement = run.group.gpu
    run.recover(device_lost, gpu)
    assert run.group.gpu is replacement, "another call of the device that failed"


def test_a_data_process_that_died_is_made_known_to_the_gpu_workers(place: Placement) -> None:
    run = Run(place)
    run.recover(death_of(run.group.data.actor))
    assert run.group.gpu.asked[-2:] == ["take_data", "until_data_dies"]
    assert run.replaced == ["data"]


def test_nobody_is_replaced_where_the_run_must_start_again(place: Placement) -> None:
    run = Run(place, repeats_steps=False)
    num_taken = len(place.taken)
    with pytest.raises(LostProcessError, match=r"^the GPU worker died with what lives on the device"):
        run.recover(death_of(run.group.gpu))
    place.lost_hosts = "the Ray node of host 1 of 2 is gone"
    with pytest.raises(LostProcessError, match=r"^the Ray node of host 1 of 2 is gone"):
        run.recover(death_of(run.group.data.actor))
    assert len(place.taken) == num_taken
    assert (run.deaths, run.replaced) == (["GPU worker", "data"], [])


def test_before_the_first_step_the_death_of_a_gpu_worker_ends_the_run(place: Placement) -> None:
    run = Run(place)
    run._progress = None
    with pytest.raises(MegatrainError, match=r"^a process of the run died \(GPU worker\); the same command resumes"):
        run.recover(death_of(run.group.gpu))


def test_any_other_error_goes_on(place: Placement) -> None:
    error = RayTaskError("step", "a traceback", ValueError("a bug"), "", 1, "here")
    with pytest.raises(RayTaskError) as raised:
        Run(place).recover(error)
    assert raised.value is error
