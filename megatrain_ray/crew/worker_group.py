"""Drives the actors of a run: starts them, tracks what each is doing, and replaces those that die.

Optimizer shards and the arena owner keep their state in shared memory, which outlives them, so a replacement continues
where they stopped. A replaced GPU worker repeats the step that was not committed. A replaced data process draws the
same batches.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.console.logs import say
from megatrain_ray.crew.actor_role import (
    AGAIN,
    CHECK_S,
    Post,
    Task,
    actor_id,
    answer,
    await_begin,
    could_not_start,
    ended,
    held,
    result_or_cause,
)
from megatrain_ray.crew.crew_posts import check_run_dir, owner_post, shard_post, warn_of_memory
from megatrain_ray.crew.failures import FailureBudget, FaultWatch, Unwatched
from megatrain_ray.crew.gpu_worker_group import GpuSide
from megatrain_ray.crew.placement import Placement, crew_spec
from megatrain_ray.crew.work_calls import WorkCalls
from megatrain_ray.engine.device.deadlines import transfer_deadline_s
from megatrain_ray.engine.shards.save_gate import NO_ATTEMPT, SaveAttempt
from megatrain_ray.errors import DeadlineError, LostProcessError, MegatrainError
from megatrain_ray.io.arenas.arena_holder import Handles
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.planning.prepare import Prepared
from megatrain_ray.run.process_names import DATA, GPU, gpu_name
from megatrain_ray.workers.frozen_base_check import base_checksums, checksums_in
from megatrain_ray.workers.gpu_worker import Progress

log = logging.getLogger(__name__)


class Crew:
    """Drives all actors of a run from the driver."""

    def __init__(
        self,
        prepared: Prepared,
        check_cluster: Callable[[], None] = lambda: None,
        record: Callable[[Mapping[str, int]], None] = lambda pids: None,
        placement: Placement | None = None,
        failures: FailureBudget | None = None,
        watch: FaultWatch | None = None,
        left: Mapping[str, Sequence[int]] = {},
    ) -> None:
        """Prepare to run a plan. `start` starts the actors.

        check_cluster: called in every wait; raises an error when nothing can go on.
        record: called with the process ids, by name, when processes change.
        placement: holds actors that have started already; None: they start when they are needed.
        failures: budget of all crews of a start; None: this is the only crew.
        watch: is notified of deaths and replacements.
        left: `elsewhere` of the previous crew, whose processes are ending.
        """
        self._prepared = prepared
        self._check_cluster = check_cluster
        self._record = record
        self._placement = placement
        self._failures = failures or FailureBudget(prepared.config.max_failures)
        self._watch = watch or Unwatched()
        self._left = left
        self._posts: list[Post] = []
        self._shards: list[Post] = []
        self._gone: set[str] = set()  # ids of actors that were replaced
        self._newest_save = NO_ATTEMPT
        self.base_checksums: Sequence[int | None] = ()  # of frozen parts, if saves leave them out; set by `load`
        self.kernel_names: Sequence[str] = ()  # of the kernels that updates run as; set by `start`
        self._side: GpuSide | None = None
        self._progress: Callable[[], Progress] | None = None  # set once steps can run
        self._building: Any = None
        self._own_handles: Handles = {}

    @property
    def side(self) -> GpuSide:
        """Return the GPU workers and the data process. Valid after `start`."""
        assert self._side is not None
        return self._side

    @property
    def gpu(self) -> Any:
        """Return the handle of the current GPU worker, of several that of rank 0. Valid after `start`."""
        return self.side.gpu

    @property
    def data(self) -> Any:
        """Return the handle of the current data process. Valid after `start`."""
        return self.side.data

    def start(self, data_arguments: Callable[[], Mapping[str, Any]]) -> None:
        """Place and start all actors. Weights are not loaded yet.

        data_arguments: returns the arguments of a data process that continues from where training stands at that
            moment.
        """
        plan = self._prepared.plan
        place = self._placement = self._placement or Placement(crew_spec(self._prepared), awaits_nodes=True)
        place.wait(check=self.check)
        side = self._side = GpuSide(self._prepared, place, data_arguments, self.check)
        self._posts = [owner_post(self._prepared, place, host, self._left) for host in range(plan.hosts.num_hosts)]
        for owner in self._posts:
            self._fill(owner, None)
            self._assign(owner, lambda actor: actor.run.remote(), serves=True)
        if plan.hosts.num_hosts > 1:
            check_run_dir(self._prepared, place, self._posts, self.check)
            warn_of_memory(self._posts, self.check)
        with held(self._posts[0].handles) as self._own_handles:  # so far only their owner holds them
            self._start_others(place, side)
        self._own_handles = {}
        self._record(self.pids)

    def _start_others(self, place: Placement, side: GpuSide) -> None:
        """Start shards and GPU workers, which attach the owner's arenas."""
        numbers = range(self._prepared.plan.num_parts - 1)
        self._shards = [shard_post(self._prepared, place, number) for number in numbers]
        for post in self._shards:  # all attach at the same time
            post.fill(self._holders(post.host), None)
        attaching = side.take_gpus(self._holders)
        self._posts += self._shards
        for post in self._shards:
            self._introduce(post)
        self.kernel_names = sorted(set(self._ask_shards("kernel_name")))
        log.info("updates run as %s", ", ".join(self.kernel_names))
        side.introduce(attaching)
        self._tell_of_homes()

    def _tell_of_homes(self) -> None:
        """Print one warning about all threads and memory that are not where the plan put them. Training goes on."""
        if not self._prepared.plan.shards.homes:
            return
        calls = self.side.ask_each("home_problems")
        of_gpus = [answer("a GPU worker did not start", call, self.check) for call in calls]
        problems = {problem for found in (*self._ask_shards("home_problems"), *of_gpus) for problem in found}
        if problems:
            say(f"warning: {'; '.join(sorted(problems))}; updates may be slower (docs/numa.md)")

    @property
    def pids(self) -> dict[str, int]:
        """Return the ids of the run's processes on the first host, which is this one, by name."""
        posts = {post.name: post.pid for post in self._posts if post.pid is not None and not post.host}
        return (self._side.pids_here if self._side else {}) | posts

    @property
    def elsewhere(self) -> dict[str, list[int]]:
        """Return the ids of the run's processes on other hosts, by Ray node. The driver cannot see when these end."""
        pids: dict[str, list[int]] = {}
        if self._side is not None and self._placement is not None and self._placement.is_placed:
            on_hosts = [(post.host, post.pid) for post in self._posts] + self._side.pids_on_hosts
            for host, pid in on_hosts:
                if host and pid is not None:
                    pids.setdefault(self._placement.node_of(host), []).append(pid)
        return pids

    def load(self, save_folder: Path | None, manifest: Manifest | None) -> None:
        """Fill all state from a save, or from the model's source. The engine is built meanwhile.

        save_folder, manifest: of the save; None: the model's source.

        Raises what the actors raised, and ConfigError if a save leaves out frozen parameters and these have changed.
        """

        def task(actor: Any) -> Any:
            return actor.initialize.remote() if save_folder is None else actor.restore.remote(save_folder, manifest)

        for post in self._shards:
            self._assign(post, task, serves=False)
        filling = self.side.ask_each("fill", save_folder, manifest)
        self._building = self.side.ask_each("build")
        of_gpu = [*filling, *self._building]
        plan = self._prepared.plan
        limit_s = transfer_deadline_s(plan.updated_bytes + plan.frozen_bytes)
        deadline_s = time.monotonic() + limit_s
        while busy := [post.name for post in self._shards if post.call is not None]:
            if time.monotonic() > deadline_s:
                raise DeadlineError(f"{', '.join(busy)} did not load its weights within {limit_s:.0f} s; {AGAIN}")
            for call in self.wait(of_gpu, 1.0):
                of_gpu.remove(call)
                result_or_cause(
                    call, of_gpu, self.check
                )  # raises at once if it failed: shards may load for minutes more
        for call in filling:
            self._until(call, "the layers on the device were not filled", limit_s)
        if not plan.saves.includes_frozen:
            self.base_checksums = base_checksums(self._prepared, lambda: self._ask_for_base(limit_s))
            if manifest is not None:
                manifest.check_base(checksums_in(self._prepared, manifest, self.base_checksums))

    def _ask_for_base(self, limit_s: float) -> Sequence[int | None]:
        found: Sequence[int | None] = self._until(self.gpu.base_checksums.remote(), "the base was not read", limit_s)
        return found

    def copy_bytes_per_s(self) -> float:
        """Return the rate at which all shards together copy layers aside for a save. Known once weights are loaded."""
        rates = self._ask_shards("copy_bytes_per_s")
        return sum(rates) * len(self._shards) / len(rates) if rates else math.inf

    def begin(self, progress: Callable[[], Progress]) -> None:
        """Start the engine, which `load` began to build, and then the shards.

        The engine resets the signal words that the shards obey, so it starts first.

        progress: returns where training stands at that moment.
        """
        self.side.all_of(self._building, self._until_all, "did not build its engine")
        self.side.begin("start", progress, self._until_all, "did not start its engine")
        for post in self._shards:
            self._assign(post, lambda actor: actor.run.remote(self._newest_save), serves=True)
        self.side.watch()
        self._progress = progress

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Return those of `calls` that have ended, once one has or `timeout_s` seconds are over.

        Meanwhile replaces processes that die. Raises what a task raised, and MegatrainError for a death that cannot be
        made good.
        """
        self._check_cluster()
        watched = {post.call: post for post in self._posts if post.call is not None}
        of_side = self._side.watched if self._side else []
        everything = [*calls, *watched, *of_side]
        done, _ = ray.wait(everything, num_returns=1, timeout=timeout_s)
        if done:
            done, _ = ray.wait(everything, num_returns=len(everything), timeout=0)
        for call in done:
            if call in watched:
                self._task_ended(watched[call], call)
            elif call in of_side:
                self._side_ended(call)
        return [call for call in done if call in calls]

    def step(self, step: int, save: bool) -> Any:
        """Submit a step to all GPU workers, and return the call of rank 0, whose result is that of all.

        save: a save wants the state after this step.
        """
        return self.side.ask("step", step, save)

    def evaluate(self, step: int, index: int) -> Any:
        """Submit a batch of the held-out data, in the same way as a step.

        index: number of the batch.
        """
        return self.side.ask("evaluate", step, index)

    def write_parts(self, save_folder: Path, step: int, compression: SaveCompression) -> list[Any]:
        """Let all processes that hold state write their parts of a step's save; return the calls. Training goes on."""
        attempt = self._newest_save = SaveAttempt(step, self._newest_save.number + 1)
        writers = [post.actor for post in self._shards] + [self.gpu] * bool(self._prepared.plan.hbm_layers)
        return [writer.write_part.remote(save_folder, attempt, compression) for writer in writers]

    def abandon_save(self) -> None:
        """Abandon the newest save: no update waits for it any more."""
        with suppress(RayActorError):  # its replacement waits for no save up to this one
            answer("a save could not be abandoned", self.gpu.abandon_save.remote(self._newest_save), self.check)
        for post in self._shards:
            try:
                answer("a save could not be abandoned", post.actor.abandon_save.remote(self._newest_save), self.check)
            except RayActorError as error:  # its replacement waits for no save up to this one
                self.replace(error)

    def replace(self, error: RayActorError) -> None:
        """Replace the actor whose death `error` reports.

        Raises MegatrainError naming it if it cannot be replaced or `max_failures` is exceeded, and LostProcessError if
        the run can go on from its last save.
        """
        if error.actor_id in self._gone:
            return
        if self._side and self._progress and not error.actor_init_failed:
            if self._side.is_data(error.actor_id):
                self._replace_data(self._side, str(error))
                return
            if error.actor_id in self._side.gpu_ids:
                self.replace_gpu(str(error))
                return
        post = next((post for post in self._posts if post.actor and actor_id(post.actor) == error.actor_id), None)
        if post is None or error.actor_init_failed:
            raise self.explain(error)
        start_s = self._lose(post.name, {actor_id(post.actor)}, str(error))
        ray.kill(post.actor)  # one that Ray could not reach for a moment may still live
        if not self._fill(post, post.pid):
            return  # that one died as well, and its own replacement has the task
        if post.task:
            post.call = post.task(post.actor)
        self._tell(post.name, start_s)

    def replace_gpu(self, reason: str) -> None:
        """Replace all GPU workers, one of which is dead or of no use any more.

        The new ones continue from where training stands. What was asked of the old ones must be asked again. Raises as
        `replace` does.
        """
        assert self._progress is not None
        side = self.side
        start_s = self._lose(GPU, side.gpu_ids, reason)
        try:
            side.replace_gpus(self._holders, self._progress, self._until_all, lambda: self._record(self.pids))
        except RayActorError as error:
            self.replace(error)
            return
        self._tell(GPU, start_s)

    def _replace_data(self, side: GpuSide, reason: str) -> None:
        start_s = self._lose(DATA, {actor_id(side.data)}, reason)
        try:
            side.replace_data()
        except RayActorError as error:
            self.replace(error)
            return
        self._record(self.pids)
        self._tell(DATA, start_s)

    def _lose(self, name: str, ids: Set[str], reason: str) -> float:
        """Count and record a death; return when it was noticed (time.monotonic).

        ids: of the actors that end with it.

        Raises MegatrainError if this was one death too many, or if one of Ray's processes died: then all actors die,
        one after the other.
        """
        self._check_cluster()
        self._gone |= ids
        self._watch.died(name)
        self._failures.spend(name)
        log.warning("%s died: %s", name, reason)
        self.check()
        return time.monotonic()

    def _tell(self, name: str, start_s: float) -> None:
        took_s = time.monotonic() - start_s
        self._watch.replaced(name, took_s)
        say(f"{name} died and was replaced in {took_s:.1f} s ({self._failures})")

    def explain(self, error: RayActorError) -> MegatrainError:
        """Return the error that tells the user of a death that ends the run."""
        name = self._name_of(error.actor_id)
        if error.actor_id not in self._gone:
            self._watch.died(name)
        if error.actor_init_failed:
            return MegatrainError(could_not_start(name, error))
        return MegatrainError(f"a process of the run died ({name}); the same command resumes")

    def failures(self, within_s: float = 2.0) -> Iterator[Exception]:
        """Yield the errors that tasks raised, after waiting up to `within_s` seconds for one.

        The error of a shard that failed may arrive after the errors that followed from it.
        """
        calls = [post.call for post in self._posts if post.call is not None]
        done, _ = ray.wait(calls, num_returns=1, timeout=within_s) if calls else ([], [])
        for call in done:
            try:
                ray.get(call, timeout=within_s)
            except Exception as error:
                yield error

    def spans(self, last: int) -> dict[str, Any]:
        """Ask all processes for their recorded spans; return the calls by name.

        They are answered once step `last` and its update are over.
        """
        shards = {post.name: post.actor.spans.remote(last) for post in self._shards}
        of_gpus = {gpu_name(rank): call for rank, call in enumerate(self.side.ask_each("spans", last))}
        return {**of_gpus, **shards, DATA: self.data.spans.remote()}

    def work(self) -> WorkCalls:
        """Ask the processes of the first host what they have done.

        Other hosts are left out: these results hold times, and the clocks of several hosts differ.
        """
        of_gpus = self.side.ask_each("work")[: self._prepared.plan.hosts.gpus_per_host]
        return WorkCalls([post.actor.work.remote() for post in self._shards if not post.host], of_gpus)

    def whereabouts(self) -> str:
        """Return what the GPU worker is doing, for the message about a step that does not end."""
        try:
            where: str = ray.get(self.gpu.whereabouts.remote(), timeout=10.0)
        except (GetTimeoutError, RayError):
            return f"the GPU worker (process {self.pids.get(GPU)}) does not answer"
        return f"the GPU worker is at: {where}"

    def stop(self) -> None:
        """End a run that went well: all actors close what they hold, then the processes end."""
        self.side.stop_watching()
        assert self._progress is not None
        for closing in self.side.ask_each("close", self._progress().step):
            with suppress(RayActorError, LostProcessError):  # everything is saved
                self._until(closing, "the GPU worker did not close", self._prepared.plan.update_deadline_s)
        for post in self._posts:
            post.serves = False
            with suppress(RayActorError):  # everything is saved: a death does no harm
                answer(f"{post.name} did not stop", post.actor.stop.remote(), self.check)
                answer(f"{post.name} did not end", post.call, self.check)

    def kill(self) -> None:
        """Kill the processes whatever their state, unless their cluster is gone and ends with them. Idempotent."""
        with suppress(MegatrainError):
            self._check_cluster()
            self._kill()

    def _kill(self) -> None:
        of_side = self._side.actors.values() if self._side else ()
        for actor in (*of_side, *(post.actor for post in self._posts)):
            if actor is not None:
                ray.kill(actor)
        if self._placement is not None:
            self._placement.clear()

    def _until(self, call: Any, late: str, timeout_s: float) -> Any:
        """Return the result of a call that takes time. Processes that die meanwhile are replaced."""
        self._until_all({call: late}, timeout_s)
        return self.result(call)

    def _until_all(self, calls: Mapping[Any, str], timeout_s: float) -> None:
        """Wait until several calls have ended, as `_until` does.

        calls: {call: beginning of the message if it is late}.

        Raises what the first call to fail raised, or the death of another process that made it fail.
        """
        waiting, deadline_s = dict(calls), time.monotonic() + timeout_s
        while waiting:
            for call in self.wait(list(waiting), 1.0):
                del waiting[call]
                result_or_cause(call, list(waiting), self.check)
            if waiting and time.monotonic() > deadline_s:
                raise DeadlineError(f"{next(iter(waiting.values()))} within {timeout_s:.0f} s; {AGAIN}")

    def _assign(self, post: Post, task: Task, *, serves: bool) -> None:
        post.task, post.serves = task, serves
        post.call = task(post.actor)

    def _task_ended(self, post: Post, call: Any) -> None:
        try:
            self.result(call)
        except RayActorError as error:
            self.replace(error)
            return
        if post.serves:
            raise MegatrainError(f"{post.name} stopped serving before the run was over")
        post.task = post.call = None

    def _side_ended(self, call: Any) -> None:
        """Handle the end of one of `GpuSide.watched`. Raises what the call raised.

        Either the data process died and a batch is wanted, or a GPU worker died, or a GPU worker has done what it was
        asked.
        """
        if call not in self.side.watched:  # a call of a worker that was just replaced
            return
        try:
            self.result(call)
        except RayActorError as error:
            self.replace(error)
        else:
            if not self.side.heard(call):
                self._replace_data(self.side, "the GPU worker asked it for a batch")

    def _fill(self, post: Post, after_pid: int | None) -> bool:
        post.fill(self._holders(post.host, but=post), after_pid)
        return self._introduce(post)

    def _holders(self, host: int, but: Post | None = None) -> list[Handles]:
        """Return the handles of all processes that hold the arenas of a host."""
        posts = [post.handles for post in self._posts if post is not but and post.host == host]
        of_gpu = self._side.handles.get(host, {}) if self._side else {}
        own = self._own_handles if host == 0 else {}  # the driver's
        return [handles for handles in (*posts, of_gpu, own) if handles]

    def result(self, call: Any) -> Any:
        """Return the result of a call that has ended. Raises what it raised, and what `check` raises."""
        return ended(call, self.check)

    def check(self, within_s: float = 0.0) -> None:
        """Raise MegatrainError if a process of Ray died, LostProcessError if another host is gone.

        within_s: seconds to wait for a host's loss, since a process is missed before its node.
        """
        self._check_cluster()
        deadline_s = time.monotonic() + within_s
        while self._placement is not None:
            try:
                self._placement.check_hosts()
            except MegatrainError:
                self._check_cluster()  # names the process that the node died of, if it died since the first check
                raise
            if time.monotonic() >= deadline_s or self._prepared.plan.hosts.num_hosts == 1:
                return
            time.sleep(CHECK_S)

    def _ask_shards(self, question: str) -> list[Any]:
        """Return the shards' answers. A shard that dies gives none, and is replaced."""
        answers = []
        for post in self._shards:
            try:
                answers.append(
                    answer(f"{post.name} did not answer", getattr(post.actor, question).remote(), self.check)
                )
            except RayActorError as error:
                self.replace(error)
        return answers

    def _introduce(self, post: Post) -> bool:
        """Wait until the actor has started; return False if it died meanwhile and was replaced."""
        try:
            await_begin(post.name, post.begun, self.check)
            post.handles = answer(f"{post.name} did not start", post.actor.handles.remote(), self.check)
        except RayActorError as error:
            self.replace(error)
            return False
        self._record(self.pids)
        return True

    def _name_of(self, died: str | None) -> str:
        named = {post.name: post.actor for post in self._posts}
        if self._side:
            named |= self._side.actors
        return next((name for name, actor in named.items() if actor and actor_id(actor) == died), "one of Ray's")
