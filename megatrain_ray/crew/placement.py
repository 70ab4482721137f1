"""Places the actors of a run: requests their resources, and starts them on the Ray nodes that have these."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatrain_ray.console.logs import say
from megatrain_ray.crew import ray_resources
from megatrain_ray.crew.actor_role import AGAIN, CHECK_S, Check
from megatrain_ray.crew.actors import GpuActor
from megatrain_ray.data.data_worker import DataWorker
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.engine.device.rank_group import LOOPBACK
from megatrain_ray.errors import DeadlineError, LostProcessError, MegatrainError
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.run.run_processes import DATA, GPU, OWNER, gpu_name, owner_name, shard_name
from megatrain_ray.workers.arena_owner import ArenaOwner
from megatrain_ray.workers.early_imports import COMPILER, TRANSFORMERS, waiting
from megatrain_ray.workers.shard_worker import ShardWorker

# Actors change state: a call that failed must not be repeated by Ray.
ONCE: Mapping[str, Any] = {"max_restarts": 0, "max_task_retries": 0}
SOON_S = 10.0  # seconds within which Ray places what it has room for


@dataclass(frozen=True)
class ActorsSpec:
    """Describes the actors of a run before its plan is known: their resources and their imports."""

    num_shards: int  # optimizer shards of each host
    device: str
    num_workers: int = 1  # GPU workers of all hosts
    num_hosts: int = 1
    compiles: bool = False  # GPU workers compile layers

    @property
    def num_processes(self) -> int:
        return len(self.bundle_of)

    @property
    def num_gpus(self) -> int:
        return self.num_workers if self.device == "cuda" else 0

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Return the resource bundles to request from Ray: on several hosts one for each host.

        On one host: one for GPU workers, arena owner and data process together, and one for each shard. The plan
        decides the numbers of threads; the CPUs are fractions, so that small machines can run all actors.
        """
        gpus = {"GPU": self.num_gpus / self.num_hosts} if self.num_gpus else {}
        if self.num_hosts == 1:
            return [{"CPU": 0.1 * self.num_workers, **gpus}, *({"CPU": 0.1} for _ in range(self.num_shards))]
        num_cpus = round(0.1 * (self.num_workers // self.num_hosts + self.num_shards), 4)
        return [{"CPU": num_cpus, **gpus} for _ in range(self.num_hosts)]

    @property
    def bundle_of(self) -> Mapping[str, int]:
        """Return the index of the bundle of each process, by the name of the process."""
        bundles = {owner_name(host): host for host in range(self.num_hosts)}
        for k in range(self.num_hosts * self.num_shards):
            bundles[shard_name(k)] = k // self.num_shards if self.num_hosts > 1 else 1 + k
        host_workers = self.num_workers // self.num_hosts
        return {**bundles, **{gpu_name(rank): rank // host_workers for rank in range(self.num_workers)}, DATA: 0}


def actors_spec(run_spec: RunSpec) -> ActorsSpec:
    plan = run_spec.plan
    return ActorsSpec(
        plan.shards.num_shards,
        plan.device,
        plan.hosts.num_gpus,
        plan.hosts.num_hosts,
        compiles=plan.compute.compiled_loss,
    )


class Placement:
    """Places the actors of a run and starts them.

    The first actors start with the placement, while the driver still plans. Each imports what it needs, which takes
    longer than anything else of a start, and waits for `setup`.

    All actors of a host are on one Ray node: those of the first host on the driver's node, those of other hosts on
    other nodes.
    """

    def __init__(self, spec: ActorsSpec, *, awaits_nodes: bool = False) -> None:
        """Request the resources and start the first actors.

        awaits_nodes: other nodes than this one may still join the cluster.

        Raises CapacityError naming the resource that this machine's Ray node lacks, or how many nodes are missing.
        """
        self._spec = spec
        node, bundles = ray_resources.this_node(), spec.bundles
        several = spec.num_hosts > 1
        ray_resources.check_node(bundles[:1] if several else bundles, ray.nodes(), node)
        if several and not awaits_nodes:
            ray_resources.check_hosts(bundles, ray.nodes())
        self._bundles = ray_resources.place_here(bundles, node)
        self._group = placement_group(self._bundles, "STRICT_SPREAD" if several else "STRICT_PACK")
        self._bundle_of = spec.bundle_of
        self._waiting = {name: self._begin(name) for name in self._bundle_of}
        self._nodes: list[str] = []  # Ray's id of each host's node; set by `wait`

    def wait(self, soon_s: float = SOON_S, timeout_s: float = DEADLINE_S, check: Check = lambda: None) -> None:
        """Wait until the cluster has room for the actors, since others may be using it.

        After `soon_s` seconds a message is printed, after `timeout_s` more DeadlineError is raised. Also raises what
        `check` raises.
        """
        if not self._has_room(soon_s, check):
            say(f"waiting for room in the Ray cluster: {self._lacking}")
            if not self._has_room(timeout_s, check):
                remedy = "start Ray on another machine, or end" if self._spec.num_hosts > 1 else "end"
                raise DeadlineError(
                    f"the Ray cluster found no room within {timeout_s:.0f} s: {self._lacking}; {remedy} what uses it"
                )
        by_bundle = placement_group_table(self._group)["bundles_to_node_id"]
        self._nodes = [by_bundle[bundle] for bundle in range(self._spec.num_hosts)]

    def _has_room(self, timeout_s: float, check: Check) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not self._placed_within(max(0.0, min(CHECK_S, deadline_s - time.monotonic())), check):
            check()
            if time.monotonic() >= deadline_s:
                return False
        return True

    def _placed_within(self, timeout_s: float, check: Check) -> bool:
        try:
            return bool(self._group.wait(timeout_s))
        except Exception as error:  # of no class of Ray's own, once its raylet has died with the request
            check()
            raise MegatrainError(f"the Ray cluster dropped the request for room: {error}; {AGAIN}") from error

    @property
    def addresses(self) -> list[str]:
        """Return the address of each host at which the others reach it. Valid after `wait`."""
        if self._spec.num_hosts == 1:
            return [LOOPBACK]  # at which no other machine reaches it
        known = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        return [known[node] for node in self._nodes]

    def node_of(self, host: int) -> str:
        """Return Ray's id of a host's node. Valid after `wait`."""
        return self._nodes[host]

    def check_hosts(self) -> None:
        """Raise LostProcessError if the Ray node of another host is gone, with the state that it held.

        Raises MegatrainError if the driver's own node is gone, without which the driver can start nothing.
        """
        alive = {node["NodeID"] for node in ray_resources.nodes_within(DEADLINE_S) if node["Alive"]}
        gone = [str(host) for host, node in enumerate(self._nodes) if node not in alive]
        if gone and self._nodes[0] not in alive:
            raise MegatrainError("Ray's node on this machine died; the same command resumes once Ray is up again")
        if gone:
            raise LostProcessError(f"the Ray node of host {', '.join(gone)} of {self._spec.num_hosts} is gone")

    @property
    def _lacking(self) -> str:
        if self._spec.num_hosts > 1:
            return ray_resources.lacking_hosts(self._spec.bundles, ray.nodes()) or "others use what it asks for"
        return ray_resources.lacking(self._bundles, ray.available_resources()) or "another machine than this one has it"

    def take(self, name: str) -> Any:
        """Return an actor of this name that waits for `setup`: first the one that started early, then new ones."""
        return self._waiting.pop(name, None) or self._begin(name)

    def clear(self) -> None:
        """Kill the actors that nobody took, and give back the resources, once the others have ended. Idempotent."""
        while self._waiting:
            ray.kill(self._waiting.popitem()[1])
        remove_placement_group(self._group)

    def _begin(self, name: str) -> Any:
        spec = self._spec
        if name == DATA:
            return ray.remote(waiting(DataWorker)).options(**self._place(name, num_cpus=0)).remote()
        if name.startswith(OWNER):
            # Concurrent calls: run, handles and stop. It maps no memory, so it need not wait for its predecessor's end.
            return ray.remote(waiting(ArenaOwner)).options(**self._place(name, num_cpus=0, max_concurrency=3)).remote()
        if name.startswith(GPU):
            modules = (*TRANSFORMERS, *(COMPILER if spec.compiles else ()))
            num_gpus = spec.num_gpus // spec.num_workers
            kind = waiting(GpuActor, modules, ray_resources.show_own_gpus)
            return ray.remote(kind).options(**self._place(name, num_gpus=num_gpus)).remote()
        # Concurrent calls: run, write_part, spans, and those that must be answered meanwhile.
        options = self._place(name, max_concurrency=5)
        return ray.remote(waiting(ShardWorker)).options(**options).remote()

    def _place(self, name: str, **options: Any) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundle_of[name])
        return {**ONCE, "num_cpus": 0.1, "scheduling_strategy": strategy, **options}
