"""Creates the roles of the arena owner and the optimizer shards of each host, and checks what other hosts see."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain_ray.console.logs import say
from megatrain_ray.crew.actor_role import CHECK_S, ActorRole, Check, ask_all
from megatrain_ray.crew.placement import Placement
from megatrain_ray.crew.recovery import ProcessKind
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.arenas.arena_holder import Handles
from megatrain_ray.io.storage.disk_io import DiskIo
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.profiling.spill_folder import OtherHost
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_processes import owner_name, shard_name
from megatrain_ray.workers.arenas import arena_sizes, spill_files

SAME_S = 30.0  # seconds within which a file system that hosts share shows them a file that was just replaced


def owner_role(run_spec: RunSpec, place: Placement, host: int, left: Mapping[str, Sequence[int]]) -> ActorRole:
    """Return the role of the arena owner of a host. `left`: `Supervisor.remote_pids` of an earlier attempt."""

    def arguments(holders: Sequence[Handles]) -> dict[str, Any]:
        plan = run_spec.plan
        layout = run_spec.structure.layout(plan.num_fragments).on_host(host, plan.hosts.num_hosts)
        files = spill_files(plan, layout, run_spec.config.spill.path)
        folder = next((file.folder for file in files.values()), None)
        return {
            "sizes": arena_sizes(plan, layout),
            "holders": holders,
            "files": files,
            "left": left.get(place.node_of(host), ()),
            "other": OtherHost(_host_title(place, host), folder, plan.disk.io is DiskIo.KVIKIO) if host else None,
        }

    return ActorRole(ProcessKind.SHARED_STATE, owner_name(host), host, place.take, arguments)


def shard_role(run_spec: RunSpec, place: Placement, number: int) -> ActorRole:
    """Return the role of an optimizer shard. `number`: of the shard, counted over the shards of all hosts."""

    def arguments(holders: Sequence[Handles]) -> dict[str, Any]:
        return {"run_spec": run_spec, "index": number, "holders": holders, "after_pid": role.pid, "pinned": True}

    host = number // run_spec.plan.shards.num_shards
    role = ActorRole(ProcessKind.SHARED_STATE, shard_name(number), host, place.take, arguments)
    return role


def check_run_dir(run_spec: RunSpec, place: Placement, owners: Sequence[ActorRole], check: Check) -> None:
    """Raise ConfigError if another host does not see the run directory, into which all hosts save.

    Compares the plan file, again and again for at most SAME_S seconds.
    """
    path, deadline_s = RunFiles(Path(run_spec.config.run_dir).absolute()).plan_file, time.monotonic() + SAME_S
    while True:
        digests = ask_all(owners, check, "digest_of", str(path))
        different = [host for host, digest in enumerate(digests) if digest != digests[0]]
        if not different:
            return
        if time.monotonic() >= deadline_s:
            raise ConfigError(
                f"run_dir: {path.parent} on {_host_title(place, different[0])} is not the folder that it is here, and "
                "every host saves into it; give an absolute path on a file system that all share"
            )
        time.sleep(CHECK_S)


def warn_of_memory(owners: Sequence[ActorRole], check: Check) -> None:
    """Print a warning for every other host on which spill.path is in memory. The plan warned of the driver's own."""
    for text in filter(None, ask_all(owners, check, "memory_warning")):
        say(f"warning: {text}")


def _host_title(place: Placement, host: int) -> str:
    return f"{place.addresses[host]} (host {host})"
