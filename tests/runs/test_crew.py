"""The crew of a run: what passes through Ray, and what happens when somebody dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.experimental import get_object_locations

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.crew.placement import ActorsSpec, Placement
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.errors import DeadlineError, LostPeerError, LostProcessError, MegatrainError
from megatrain_ray.planning.run_spec import RunSpec, prepare
from megatrain_ray.run.run_processes import DATA, wait_gone
from megatrain_ray.workers.messages import Progress
from tests.support.runs import config
from tests.support.texts import tokens_of

SHAPES: dict[int, dict[str, int]] = {
    300_000: {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4},
    30_000_000: {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10},
}


def run_spec(folder: Path, shape: dict[str, int], **changes: Any) -> RunSpec:
    model = {"model_type": "llama", "vocab_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2} | shape
    tree = config(folder, model, train__steps=8, train__precision="bf16", **changes)
    return prepare(TrainConfig.model_validate(tree).resolve())


def arguments_of(ready: RunSpec) -> dict[str, Any]:
    """Return the arguments of the data process."""
    data = ready.config.data
    return {
        "data": data,
        "tokens": tokens_of(data, Path(ready.config.run_dir)),
        "vocab_size": ready.structure.vocab_size,
        "batch_size": ready.plan.step.micro_batch_size * ready.plan.step.num_micro_batches,
        "step": 0,
        "position": None,
    }


@contextmanager
def started(ready: RunSpec, placement: Placement | None = None) -> Iterator[WorkerGroup]:
    crew = WorkerGroup(ready, placement=placement)
    try:
        crew.start(arguments_of(ready))
        crew.load(None, None)
        crew.begin(lambda: Progress(0, 0))
        yield crew
    finally:
        crew.kill()


def losses_of(crew: WorkerGroup, steps: range) -> list[float]:
    """Run the steps one after the other and return their losses, replacing whoever dies."""
    losses = []
    for step in steps:
        call = crew.step(step, save=False)
        deadline_s = time.monotonic() + 120
        while not crew.wait([call], 1.0):
            assert time.monotonic() < deadline_s
        try:
            losses.append(ray.get(call).row["loss"])
        except RayActorError as error:  # it has ended before the call by which the crew watches who made it
            crew.recover(error)
            raise
    return losses


def replaced(crew: WorkerGroup, before: Mapping[str, int]) -> set[str]:
    """Return the names of the processes that are other ones than `before`."""
    return {name for name, pid in crew.pids.items() if before[name] != pid}


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def size_of(reference: Any) -> int:
    """Return the bytes of an object that passed through Ray, in the store or inline."""
    ray.wait([reference], timeout=120)
    size: int = get_object_locations([reference])[reference]["object_size"]
    return size


@pytest.mark.long
def test_what_passes_through_ray_does_not_grow_with_the_model(tmp_path: Path, ray_address: str) -> None:
    """Per step: a call, a batch and a row. Weights, gradients and state are a hundred times larger here and there."""
    sizes = {}
    for num_parameters, shape in SHAPES.items():
        ready = run_spec(tmp_path / str(num_parameters), shape)
        total = sum(layer.num_parameters for layer in ready.plan.layers)
        assert total == pytest.approx(num_parameters, rel=0.15)
        with started(ready) as crew:
            results = [crew.step(step, save=False) for step in (1, 2)]
            losses = [result.row["loss"] for result in ray.get(results, timeout=120)]
            batch = crew.data.batch.remote(4)  # the worker has asked for 3 already
            sizes[num_parameters] = (size_of(batch), *(size_of(result) for result in results))
            assert losses[1] > 0
            crew.stop()
    small, large = sizes.values()
    # A row holds byte counts, with more digits for the larger model, and a time more where something was waited for.
    assert small == pytest.approx(large, abs=100)
    assert max(large) < 5_000


def pid_of(actor: Any) -> int:
    """Asked in the actor's process."""
    return os.getpid()


def test_the_first_actors_begin_before_there_is_a_plan(tmp_path: Path, ray_address: str) -> None:
    placement = Placement(ActorsSpec(1, "cpu"))
    pid = ray.get(placement._waiting[DATA].__ray_call__.remote(pid_of), timeout=120)
    with started(run_spec(tmp_path, SHAPES[300_000]), placement) as crew:
        assert crew.pids["data"] == pid
        assert losses_of(crew, range(1, 2))[0] > 0
        crew.stop()


@pytest.mark.long
def test_those_whom_nobody_needs_end(ray_address: str) -> None:
    placement = Placement(ActorsSpec(2, "cpu"))
    pid = ray.get(placement._waiting[DATA].__ray_call__.remote(pid_of), timeout=120)
    placement.clear()
    placement.clear()
    wait_gone(pid, 60.0)


def test_who_cannot_be_set_up_is_named(tmp_path: Path, ray_address: str) -> None:
    ready = run_spec(tmp_path, SHAPES[300_000])
    crew = WorkerGroup(ready)
    wrong = {"data": ready.config.data, "tokens": None, "vocab_size": 320, "batch_size": 1, "step": 0, "position": None}
    try:
        with pytest.raises(
            MegatrainError, match=r"^a process of the run \(the data process\) could not start: TypeErr"
        ):
            crew.start(wrong)
    finally:
        crew.kill()


@pytest.mark.long
def test_what_the_gpu_worker_failed_by_is_told_while_shards_load(tmp_path: Path, ray_address: str) -> None:
    """Shards that will never have loaded: they are stopped."""
    ready = run_spec(tmp_path, SHAPES[300_000])
    crew = WorkerGroup(ready)
    try:
        crew.start(arguments_of(ready))
        shard = crew.pids["optimizer shard 0"]
        os.kill(shard, signal.SIGSTOP)
        end(crew.pids["GPU worker"])
        with pytest.raises(RayActorError) as death:
            crew.load(None, None)
        assert str(crew.explain(death.value)).startswith("a process of the run died (GPU worker)")
        os.kill(shard, signal.SIGCONT)
    finally:
        crew.kill()


@pytest.mark.long
def test_shards_and_owner_are_replaced_and_nothing_changes(tmp_path: Path, ray_address: str) -> None:
    """They die in any order, the owner and a shard at the same time too: whoever is left holds the memory."""
    ready = run_spec(tmp_path, SHAPES[300_000], hardware__num_shards=2, max_failures=4)
    with started(ready) as crew:
        undisturbed = losses_of(crew, range(1, 4))
        crew.stop()
    with started(ready) as crew:
        disturbed = losses_of(crew, range(1, 2))
        end(crew.pids["optimizer shard 1"])
        disturbed += losses_of(crew, range(2, 3))
        before = crew.pids
        end(before["arena owner"])
        end(before["optimizer shard 0"])
        disturbed += losses_of(crew, range(3, 4))
        crew.stop()
        assert replaced(crew, before) == {"arena owner", "optimizer shard 0"}
    assert disturbed == undisturbed


@ray.remote(num_cpus=0)
class Waiting:
    def wait(self) -> None:
        threading.Event().wait()


def test_a_death_is_told_while_another_one_is_waited_for(tmp_path: Path, ray_address: str) -> None:
    crew = WorkerGroup(run_spec(tmp_path, SHAPES[300_000]))
    actors = [Waiting.remote() for _ in range(2)]
    calls = {actor.wait.remote(): "too late" for actor in actors}
    try:
        ray.kill(actors[1])
        with pytest.raises(RayActorError) as told:
            crew.until_all(calls, 60)
        assert told.value.actor_id == actors[1]._actor_id.hex()
        with pytest.raises(DeadlineError, match=r"too late within 0 s"):
            crew.until_all({next(iter(calls)): "too late"}, 0.0)
    finally:
        for actor in actors:
            ray.kill(actor)
        crew.kill()


@ray.remote(num_cpus=0)
class Lost:
    def meet(self) -> None:
        raise LostPeerError("the others are gone")


def test_the_death_behind_a_failure_is_told_instead_of_it(tmp_path: Path, ray_address: str) -> None:
    """A rank fails because another has died, and is heard of first. Where nobody died it speaks for itself."""
    crew = WorkerGroup(run_spec(tmp_path, SHAPES[300_000]))
    lost, dies = [Lost.remote() for _ in range(2)], Waiting.remote()
    of_lost, of_dead = [actor.meet.remote() for actor in lost], dies.wait.remote()
    try:
        ray.wait(of_lost, num_returns=2)
        with pytest.raises(RayTaskError, match="the others are gone"):
            crew.until_all(dict.fromkeys(of_lost, "too late"), 60)
        ray.kill(dies)
        with pytest.raises(RayActorError) as told:
            crew.until_all(dict.fromkeys([*of_lost, of_dead], "too late"), 60)
        assert told.value.actor_id == dies._actor_id.hex()
    finally:
        for actor in lost:
            ray.kill(actor)
        crew.kill()


def test_one_death_more_than_allowed_ends_the_run(tmp_path: Path, ray_address: str) -> None:
    ready = run_spec(tmp_path, SHAPES[300_000], max_failures=0)
    with started(ready) as crew:
        end(crew.pids["optimizer shard 0"])
        with pytest.raises(MegatrainError, match=r"optimizer shard 0 died, .* number 1 \(max_failures: 0\); the same"):
            losses_of(crew, range(1, 2))


@pytest.mark.long
def test_the_gpu_worker_and_the_data_process_are_replaced_and_nothing_changes(tmp_path: Path, ray_address: str) -> None:
    """One after the other and both at the same time, two steps ahead of what was heard of."""
    ready = run_spec(tmp_path, SHAPES[300_000], max_failures=4)
    losses: list[float] = []
    crew = WorkerGroup(ready)

    try:
        crew.start(arguments_of(ready))
        crew.load(None, None)
        crew.begin(lambda: Progress(len(losses), len(losses)))
        for victims in ((), ("GPU worker",), ("data",), ("data", "GPU worker")):
            gpu, before = crew.gpu, crew.pids
            for name in victims:
                end(before[name])
            call = gpu.step.remote(len(losses) + 1, save=False)
            while True:
                try:
                    crew.wait([call], 1.0)
                    if ray.wait([call], timeout=0)[0]:
                        result = ray.get(call)
                        break
                except RayActorError as error:
                    crew.recover(error)
                if crew.gpu is not gpu:
                    gpu = crew.gpu
                    call = gpu.step.remote(len(losses) + 1, save=False)
            losses.append(result.row["loss"])
            deadline_s = time.monotonic() + 60
            while replaced(crew, before) != set(victims) and time.monotonic() < deadline_s:
                crew.wait([], 1.0)  # a step may end before it is noticed that there is no batch for the next one
            position = crew.until(crew.position_after(len(losses)), "no position", 60)
            assert position["cursor"] == len(losses) * ready.plan.batch_size
            assert replaced(crew, before) == set(victims)
        crew.stop()
    finally:
        crew.kill()
    with started(ready) as crew:
        assert losses == losses_of(crew, range(1, 5))
        crew.stop()


@pytest.mark.long
def test_a_step_that_cannot_be_made_again_is_told(tmp_path: Path, ray_address: str) -> None:
    """Without clipping, the updates of the step have begun."""
    with started(run_spec(tmp_path, SHAPES[300_000], train__clip=None)) as crew:
        losses_of(crew, range(1, 2))
        end(crew.pids["GPU worker"])
        with pytest.raises(LostProcessError, match=r"^the GPU worker died with what lives on the device, or an update"):
            losses_of(crew, range(2, 3))
        assert crew.current_phase().startswith("the GPU worker (process")
