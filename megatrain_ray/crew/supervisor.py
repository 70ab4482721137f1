"""Waits for the actors of a run, and carries out what recovery.py decides about those that die."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from megatrain_ray.console.logs import say
from megatrain_ray.crew.actor_role import AGAIN, CHECK_S, ActorRole, actor_id, ask_all, ended, result_or_cause
from megatrain_ray.crew.gpu_worker_group import GpuWorkerGroup
from megatrain_ray.crew.host_roles import owner_role, shard_role
from megatrain_ray.crew.placement import Placement, actors_spec
from megatrain_ray.crew.recovery import Failure, FailureBudget, ProcessKind, RecoveryAction, decide, describe_death
from megatrain_ray.errors import DeadlineError, LostDeviceError, LostProcessError, MegatrainError, ShardFailedError
from megatrain_ray.io.arenas.arena_holder import Handles
from megatrain_ray.metrics.sink import DeathRecorder
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.run.run_processes import GPU
from megatrain_ray.workers.messages import Progress

log = logging.getLogger(__name__)

RAYS_OWN = "one of Ray's"  # name of a process that is none of the run's actors
ERRORS_S = 2.0  # seconds within which the error of a shard arrives after those that followed from it


class Supervisor:
    """Keeps the actors of a run going: every wait for one of them notices a death of any, and replaces the dead."""

    def __init__(
        self, run_spec: RunSpec, check_cluster: Callable[[], None] = lambda: None,
        record: Callable[[Mapping[str, int]], None] = lambda pids: None, placement: Placement | None = None,
        failures: FailureBudget | None = None, faults: DeathRecorder | None = None,
        left: Mapping[str, Sequence[int]] = {},
    ) -> None:  # fmt: skip
        """Request the actors' resources, if no placement has done so.

        check_cluster: called in every wait; raises an error when nothing can go on.
        record: called with the process ids, by name, when processes change.
        placement: holds actors that have started already; None: they start now.
        failures: budget of all worker groups of a start; None: this is the only one.
        faults: records deaths and replacements; None: nobody does.
        left: `remote_pids` of the previous group, whose processes are ending.
        """
        self._run_spec = run_spec
        self._check_cluster = check_cluster
        self._record = record
        place = self._place = placement or self._new_placement()
        self._failures = failures or FailureBudget(run_spec.config.max_failures)
        self._faults = faults
        plan = run_spec.plan
        self._owners = [owner_role(run_spec, place, host, left) for host in range(plan.hosts.num_hosts)]
        self._shards = [shard_role(run_spec, place, number) for number in range(plan.num_parts - 1)]
        self.group = GpuWorkerGroup(run_spec, place, self.check, self.until_all)
        self._gone: set[str] = set()  # ids of actors that died, or were replaced
        self._progress: Callable[[], Progress] | None = None  # set once steps can run
        self._own_handles: Handles = {}  # what the driver holds while actors start

    def _new_placement(self) -> Placement:
        try:
            return Placement(actors_spec(self._run_spec), awaits_nodes=True)
        except RayError as error:
            self._check_cluster()  # names the process of Ray that died
            raise MegatrainError(f"the Ray cluster does not answer: {error}") from error

    @property
    def _roles(self) -> list[ActorRole]:
        return [*self._owners, *self._shards, *self.group.workers, self.group.data]

    @property
    def pids(self) -> dict[str, int]:
        """Return the ids of the run's processes on the first host, which is this one, by name."""
        return {role.name: role.pid for role in self._roles if role.pid is not None and not role.host}

    @property
    def remote_pids(self) -> dict[str, list[int]]:
        """Return the ids of the run's processes on other hosts, by Ray node. The driver cannot see when these end."""
        pids: dict[str, list[int]] = {}
        for role in self._roles:
            if role.host and role.pid is not None:
                pids.setdefault(self._place.node_of(role.host), []).append(role.pid)
        return pids

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Return those of `calls` that have ended, once one has or `timeout_s` seconds are over.

        Meanwhile replaces processes that die. Raises what a task raised, and MegatrainError for a death that cannot be
        made good.
        """
        self._check_cluster()
        tasks = {role.call: role for role in self._roles if role.call is not None}
        everything = [*calls, *tasks, *self.group.asked]
        done, _ = ray.wait(everything, num_returns=1, timeout=timeout_s)
        if done:
            done, _ = ray.wait(everything, num_returns=len(everything), timeout=0)
        for call in done:
            if call in tasks:
                self._task_ended(tasks[call], call)
            elif call in self.group.asked and self._succeeded(call):  # of a GPU worker above rank 0
                self.group.asked.remove(call)
        return [call for call in done if call in calls]

    def _succeeded(self, call: Any) -> bool:
        """Return whether a call that has ended has a result, and make good a death. Raises other errors."""
        try:
            self.result(call)
        except RayActorError as error:
            self.recover(error)
            return False
        return True

    def _task_ended(self, role: ActorRole, call: Any) -> None:
        if role.call != call or not self._succeeded(call):  # a call that differs was of an actor just replaced
            return
        if role.kind is ProcessKind.GPU:
            self._handle_failure(self.group.data, "the GPU worker asked it for a batch")
        elif role.serves:
            raise MegatrainError(f"{role.name} stopped serving before the run was over")
        else:
            role.task = role.call = None

    def until(self, call: Any, late: str, timeout_s: float) -> Any:
        """Return the result of a call that takes time. Processes that die meanwhile are replaced."""
        self.until_all({call: late}, timeout_s)
        return self.result(call)

    def until_all(self, calls: Mapping[Any, str], timeout_s: float) -> None:
        """Wait until several calls, {call: beginning of the message if it is late}, have ended, as `until` does.

        Raises what the first call to fail raised, or the death of another process that made it fail.
        """
        waiting, deadline_s = dict(calls), time.monotonic() + timeout_s
        while waiting:
            for call in self.wait(list(waiting), 1.0):
                del waiting[call]
                result_or_cause(call, list(waiting), self.check)
            if waiting and time.monotonic() > deadline_s:
                raise DeadlineError(f"{next(iter(waiting.values()))} within {timeout_s:.0f} s; {AGAIN}")

    def result(self, call: Any) -> Any:
        """Return the result of a call that has ended. Raises what it raised, and what `check` raises."""
        return ended(call, self.check)

    def check(self, within_s: float = 0.0) -> None:
        """Raise MegatrainError if a process of Ray died, LostProcessError if another host is gone.

        within_s: seconds to wait for a host's loss, since a process is missed before its node.
        """
        self._check_cluster()
        deadline_s = time.monotonic() + within_s
        while True:
            try:
                self._place.check_hosts()
            except MegatrainError:
                self._check_cluster()  # names the process that the node died of, if it died since the first check
                raise
            if time.monotonic() >= deadline_s or self._run_spec.plan.hosts.num_hosts == 1:
                return
            time.sleep(CHECK_S)

    def ask_shards(self, question: str) -> list[Any]:
        """Return the shards' answers. A shard that dies gives none, and is replaced."""
        answers = []
        for shard in self._shards:
            try:
                answers += ask_all([shard], self.check, question)
            except RayActorError as error:
                self.recover(error)
        return answers

    def holders(self, host: int, but: ActorRole | None = None) -> list[Handles]:
        """Return the handles of all processes that hold the arenas of a host."""
        handles = [role.handles for role in self._roles if role.host == host and role is not but]
        own = self._own_handles if host == 0 else {}
        return [each for each in (*handles, own) if each]

    def recover(self, error: RayError, gpu: Any = None) -> None:
        """Make good the death, or the failed device, that an error of a call reports.

        gpu: the GPU worker of rank 0 when the call was made. If it was replaced since, its device needs no recovery.

        Raises `error` itself if it reports neither, MegatrainError if the run ends, and LostProcessError if it can go
        on from its newest save.
        """
        cause = getattr(error, "cause", None)
        if isinstance(error, RayActorError):
            if error.actor_id not in self._gone:
                self._handle_failure(self._role_of(error.actor_id), str(error), could_not_start=error.actor_init_failed)
        elif isinstance(cause, LostDeviceError):
            if self.group.gpu is gpu:
                self._handle_failure(self.group.workers[0], str(cause))
        else:
            raise error

    def _handle_failure(self, role: ActorRole | None, reason: str, *, could_not_start: bool = False) -> None:
        """Record the failure of a process or its device, and carry out what recovery.py decides.

        role: None for a process that is none of the run's actors.
        """
        self._check_cluster()  # all actors die with Ray, one after the other
        start_s = time.monotonic()
        kind, name, lost = ProcessKind.UNKNOWN, RAYS_OWN, []
        if role:
            kind, name, lost = role.kind, role.name, [role]
        if kind is ProcessKind.GPU and self._progress:
            name, lost = GPU, self.group.workers
        self._gone |= {actor_id(each.actor) for each in lost}
        self._record_death(name)
        self._failures.count += 1
        log.warning("%s died: %s", name, reason)
        can_step, repeats_steps = self._progress is not None, self._run_spec.plan.repeats_steps
        failure = Failure(name, kind, reason, could_not_start, can_step, repeats_steps, self._lost_hosts())
        decision = decide(failure, self._failures)
        log.info("%s: %s", decision.action.value, decision.why)
        if decision.error:
            raise decision.error
        try:
            self._replace(lost, decision.action)
        except RayActorError as error:  # of a replacement, whose own replacement then has the task
            self.recover(error)
            return
        self._record(self.pids)
        took_s = time.monotonic() - start_s
        if self._faults:
            self._faults.replaced(name, took_s)
        say(f"{name} died and was replaced in {took_s:.1f} s ({self._failures})")

    def _record_death(self, name: str) -> None:
        if self._faults:
            self._faults.died(name)

    def _replace(self, lost: Sequence[ActorRole], action: RecoveryAction) -> None:
        for role in lost:
            ray.kill(role.actor)  # one that Ray could not reach for a moment may still live
        if action is RecoveryAction.REPLACE_GPU_WORKERS:
            assert self._progress is not None
            self.group.replace_gpus(self.holders, self._progress, lambda: self._record(self.pids))
            return
        [role] = lost
        if role is self.group.data:
            self.group.replace_data()
            return
        role.start(self.holders(role.host, but=role))
        role.wait_ready(self.check)
        if role.task:
            role.call = role.task(role.actor)

    def _lost_hosts(self) -> str:
        try:
            self.check()
        except LostProcessError as error:
            return str(error)
        return ""

    def _role_of(self, died: str | None) -> ActorRole | None:
        return next((role for role in self._roles if role.actor and actor_id(role.actor) == died), None)

    def explain(self, error: RayError) -> MegatrainError:
        """Return the error that the user should read when `error` ends the run.

        This is our own error if an actor raised one. The error of a shard's own task comes before those that followed
        from it.
        """
        for failure in (*self._task_errors(), error):
            cause = failure.cause if isinstance(failure, RayTaskError) else failure
            if isinstance(cause, MegatrainError) and not isinstance(cause, ShardFailedError):
                return cause
            if isinstance(cause, RayActorError):
                return self._explain_death(cause)
        return MegatrainError(f"an actor failed: {type(error).__name__}: {error}")

    def _explain_death(self, error: RayActorError) -> MegatrainError:
        role = self._role_of(error.actor_id)
        name = role.name if role else RAYS_OWN
        if error.actor_id not in self._gone:
            self._record_death(name)
        return MegatrainError(describe_death(name, str(error), could_not_start=error.actor_init_failed))

    def _task_errors(self) -> Iterator[Exception]:
        """Yield the errors that tasks raised. That of a shard may arrive after those that followed from it."""
        calls = [role.call for role in (*self._owners, *self._shards) if role.call is not None]
        done, _ = ray.wait(calls, num_returns=1, timeout=ERRORS_S) if calls else ([], [])
        for call in done:
            try:
                ray.get(call, timeout=ERRORS_S)
            except Exception as error:
                yield error
