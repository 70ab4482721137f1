"""Runs a training with its actors as threads of this process, behind the part of Ray's API that the product uses.

Driver, crew and workers are those of a real run, and arguments travel pickled as with Ray. Only the processes are
missing, whose start costs ten times the steps of a tiny model. `make test-all` does the same runs with real processes.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from accelerate import init_empty_weights
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from megatrain_ray import training_run
from megatrain_ray.crew import placement
from megatrain_ray.driver import attempts, plan_check
from megatrain_ray.engine.model import structure
from megatrain_ray.model import architecture
from megatrain_ray.model.architecture import Architecture
from megatrain_ray.workers import gpu_worker
from megatrain_ray.workers.device_layers import DeviceLayers
from megatrain_ray.workers.early_imports import TRANSFORMERS, import_all
from megatrain_ray.workers.shard_worker import ShardWorker
from tests.support.runs import cli_here
from tests.support.thread_ranks import ThreadRanks

Actors = Callable[[], AbstractContextManager[object]]  # of the fixture `actors`: in the block, runs have these actors

NUM_NODES = 3
END_S = 60.0  # limit for the calls of an actor to end when the run is over
ACTORS: dict[str, Actor] = {}  # actors that live, by id


@dataclass(frozen=True)
class _Outcome:
    result: Any = None
    error: Exception | None = None

    def value(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


@dataclass(frozen=True)
class Train:
    """Runs `megatrain train ARGUMENTS` to its end; the fixture `train`.

    has_processes: actors are processes, and each draws random numbers of its own.
    """

    actors: Actors
    has_processes: bool

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        with self.actors():
            return cli_here("train", *arguments)


class Call:
    """A pending call of an actor, as ray.ObjectRef is one."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        return (await asyncio.wrap_future(self.future)).value()


class Actor:
    """An object whose methods run in threads of its own; coroutines run on an event loop in one thread."""

    def __init__(self, kind: type, max_concurrency: int, arguments: Sequence[Any]) -> None:
        self._id = f"{id(self):x}"
        self._actor_id = SimpleNamespace(hex=lambda: self._id)
        self._object: Any = kind(*arguments)
        self._tasks: Any = []
        self._loop: Any = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(max_concurrency, thread_name_prefix=kind.__name__)
        self._is_async = any(inspect.iscoroutinefunction(method) for method in vars(kind).values())
        if self._is_async:
            self._threads.submit(self._loop.run_forever)
        ACTORS[self._id] = self

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **kwargs: self._call(name, cloudpickle.dumps((args, kwargs))))

    def __reduce__(self) -> tuple[Any, ...]:
        return _actor, (self._id,)

    def _call(self, name: str, arguments: bytes) -> Call:
        if self._id not in ACTORS:
            raise RayActorError(self._id)
        method = getattr(self._object, name)
        if self._is_async:
            future: Future[Any] = Future()
            self._loop.call_soon_threadsafe(
                lambda: self._tasks.append(asyncio.ensure_future(_fulfil(future, method, arguments)))
            )
            return Call(future)
        return Call(self._threads.submit(_result, method, arguments))

    def end(self) -> None:
        """Release what the object holds, as the end of a process does, and end the threads. Idempotent."""
        if ACTORS.pop(self._id, None) is None:
            return
        if self._is_async:
            asyncio.run_coroutine_threadsafe(self._end_calls(), self._loop).result(END_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
        with suppress(Exception):  # it has no such method, never took up its role, or has stopped already
            self._object.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
        worker = self._object.worker
        for owner in (worker, getattr(worker, "_holder", None)):  # the latter if `run` was never called
            with suppress(Exception):
                owner.close()  # type: ignore[union-attr]
        self._loop.close()
        self._object = self._loop = self._tasks = None  # an error that somebody keeps may lead to this actor

    async def _end_calls(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if isinstance(self._object.worker, gpu_worker.GpuWorker):
            with suppress(Exception, asyncio.CancelledError):  # the engine of a step that was cut short
                await self._object.worker.abandon()


def _actor(actor_id: str) -> Actor:
    return ACTORS[actor_id]


def _result(method: Callable[..., Any], arguments: bytes) -> _Outcome:
    try:
        args, kwargs = cloudpickle.loads(arguments)
        return _Outcome(method(*args, **kwargs))
    except Exception as error:
        return _Outcome(error=_failure(method, error))


async def _fulfil(future: Future[_Outcome], method: Callable[..., Any], arguments: bytes) -> None:
    try:
        args, kwargs = cloudpickle.loads(arguments)
        result = method(*args, **kwargs)
        future.set_result(_Outcome(await result if inspect.isawaitable(result) else result))
    except asyncio.CancelledError:
        future.set_result(_Outcome(error=RayActorError()))
    except Exception as error:
        future.set_result(_Outcome(error=_failure(method, error)))


def _failure(method: Callable[..., Any], error: Exception) -> Exception:
    """Return what a caller is told. It has no traceback, whose frames would hold the memory of the run."""
    cause = cloudpickle.loads(cloudpickle.dumps(error))
    failure: Exception = RayTaskError(method.__name__, traceback.format_exc(), cause).as_instanceof_cause()
    return failure


def _get(calls: Any, timeout: float | None = None) -> Any:
    if isinstance(calls, list):
        return [_get(call, timeout) for call in calls]
    if not wait_for([calls.future], timeout).done:
        raise GetTimeoutError("the call has not ended")
    try:
        return calls.future.result().value()
    except CancelledError:
        raise RayActorError from None


def _wait(calls: list[Call], *, num_returns: int = 1, timeout: float | None = None) -> tuple[list[Call], list[Call]]:
    deadline_s = time.monotonic() + (END_S if timeout is None else timeout)
    while len(done := [call for call in calls if call.future.done()]) < num_returns:
        if time.monotonic() >= deadline_s:
            break
        waiting = [call.future for call in calls if not call.future.done()]
        wait_for(waiting, deadline_s - time.monotonic(), FIRST_COMPLETED)
    return done[:num_returns], [call for call in calls if call not in done[:num_returns]]


def _remote(kind: type) -> Any:
    def options(max_concurrency: int = 1, **others: Any) -> Any:
        return SimpleNamespace(remote=lambda *arguments: Actor(kind, max_concurrency, arguments))

    return SimpleNamespace(options=options)


def _nodes() -> list[dict[str, Any]]:
    addresses = [f"127.0.0.{1 + k}" for k in range(NUM_NODES)]
    return [
        {
            "NodeID": f"node {k}", "Alive": True, "NodeManagerAddress": address,
            "Resources": {"CPU": 64.0, f"node:{address}": 1.0},
        }
        for k, address in enumerate(addresses)
    ]  # fmt: skip


RAY = {
    "get": _get,
    "wait": _wait,
    "remote": _remote,
    "kill": Actor.end,
    "nodes": _nodes,
    "is_initialized": lambda: True,
    "get_runtime_context": lambda: SimpleNamespace(
        get_node_id=lambda: "node 0", get_accelerator_ids=lambda: {"GPU": []}
    ),
}
GROUPS = {
    "placement_group": lambda bundles, strategy: SimpleNamespace(wait=lambda timeout: True),
    "placement_group_table": lambda group: {"bundles_to_node_id": {k: f"node {k}" for k in range(NUM_NODES)}},
    "remove_placement_group": lambda group: None,
    "PlacementGroupSchedulingStrategy": lambda group, placement_group_bundle_index: None,
}

# While a model is built, Transformers sets torch's default type and Accelerate replaces a method of all modules, in all
# threads. Loading weights makes tensors of the default type.
ONE_AT_A_TIME = {
    Architecture: ("__call__",),
    ShardWorker: ("initialize", "restore"),
    DeviceLayers: ("fill",),
}
TURN = threading.RLock()


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    def waiting(*args: Any, **kwargs: Any) -> Any:
        with TURN:
            return method(*args, **kwargs)

    return waiting


@contextmanager
def _empty_weights_in_turn(*, include_buffers: bool) -> Iterator[None]:
    with TURN, init_empty_weights(include_buffers=include_buffers):
        yield


def _unknown_memory(pids: Mapping[str, int]) -> dict[str, Any]:
    raise OSError("all actors are this process, which holds much that is none of theirs")


@contextmanager
def actors_as_threads() -> Iterator[None]:
    """Let runs of the block have threads of this process for actors. Nothing of them is left afterwards."""
    import_all(TRANSFORMERS)
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        for name, function in RAY.items():
            patch.setattr(ray, name, function)
        for name, function in GROUPS.items():
            patch.setattr(placement, name, function)
        for kind, methods in ONE_AT_A_TIME.items():
            for name in methods:
                patch.setattr(kind, name, _in_turn(vars(kind)[name]))
        for module in (architecture, structure):
            patch.setattr(module, "init_empty_weights", _empty_weights_in_turn)
        patch.setattr(gpu_worker, "RankGroup", ThreadRanks)
        patch.setattr(plan_check, "pss_of_run", _unknown_memory)
        patch.setattr(gc, "freeze", lambda: None)  # objects of a run are not those of this process for ever
        for module in (training_run, attempts):
            patch.setattr(module, "await_end", lambda path: None)  # for this process
        patch.setattr(training_run, "report_at_end", nullcontext)  # drawing charts takes as long as a short run
        try:
            yield
        finally:
            for actor in list(ACTORS.values()):
                actor.end()
            torch.set_num_threads(before[0])
            torch.use_deterministic_algorithms(before[1])


IN_PROCESS = Train(actors_as_threads, has_processes=False)
